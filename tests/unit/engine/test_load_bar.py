from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from engine.config import EngineConfig
from engine.load_bar import load_bar
from engine.runner_loading import load_runner
from tests.factories import tiny_llama


def test_a_terminal_sees_the_bytes_rise_and_a_file_sees_nothing(tmp_path: Path) -> None:
    folder, config = tiny_llama(tmp_path), EngineConfig(num_blocks=4, max_model_len=64)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    file = Console(file=io.StringIO(), width=100)
    for console in (terminal, file):
        with load_bar("tiny", console) as progress:
            load_runner(folder, config, progress=progress)
    assert "loading tiny" in terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "kB" in terminal.file.getvalue()  # type: ignore[attr-defined]
    assert file.file.getvalue() == ""  # type: ignore[attr-defined]
