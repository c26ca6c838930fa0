from __future__ import annotations

from pathlib import Path

from gateway.model_formats import ModelFormats
from gateway.output_parsers import Formats
from tests.integration.tokenizer_fleet import Fleet
from tests.unit.common.text import folders


async def test_a_models_formats_are_learned_from_both_its_templates(tmp_path: Path) -> None:
    folder = folders.write_folder(tmp_path / "model", template=folders.TEMPLATE + "{# <think> #}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call>{}</tool_call>")
    fleet = Fleet(folder)
    await fleet.directory.start()
    try:
        await fleet.start_replica()
        described = await fleet.client.describe("m")
        assert (described.chat_template, described.tool_chat_template) == (
            folders.TEMPLATE + "{# <think> #}", "<tool_call>{}</tool_call>")
        assert await ModelFormats(fleet.client).of("m") == Formats("hermes", "qwen3")
    finally:
        await fleet.client.stop()
        await fleet.directory.stop()
        for service in fleet.services:
            await service.stop()
