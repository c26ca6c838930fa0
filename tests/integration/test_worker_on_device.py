"""Workers whose KV is in a device's memory, which nothing on the host can read: played by the mock runner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.block_hash import HashScheme
from common.bus import MemoryBus
from common.clients.decode import DecodeClient
from common.directory import Directory
from common.errors import ConfigError
from common.generation import Generation
from common.registry import MemoryRegistry
from common.sampling_params import SamplingParams
from common.service_host import Deps
from decode_svc.config import DecodeConfig
from decode_svc.service import build as build_decode
from engine.engine_start import start_engine
from engine.mock_runner import MockRunner
from prefill_svc.config import PrefillConfig
from prefill_svc.service import build as build_prefill
from tests.factories import tiny_llama

PROMPT = tuple(range(10, 50))


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*arguments: Any) -> Any:
        engine: Any = await start_engine(*arguments)
        engine.facts = replace(engine.facts, has_host_blocks=False)
        return engine

    def unreadable(self: MockRunner, block_id: int) -> memoryview:
        raise BufferError(f"block {block_id} was looked at")

    monkeypatch.setattr("decode_svc.service.start_engine", start)
    monkeypatch.setattr("prefill_svc.service.start_engine", start)
    monkeypatch.setattr(MockRunner, "block_view", unreadable)


def fields(folder: Path) -> dict[str, Any]:
    return {"model_path": str(tiny_llama(folder / "tiny")), "runner": "mock-hash", "num_blocks": 64,
            "max_model_len": 512, "engine_process": False}


async def test_it_serves_requests_and_registers_no_way_to_move_kv(tmp_path: Path) -> None:
    deps = Deps(MemoryBus(), MemoryRegistry())
    service = build_decode(DecodeConfig(service_id="decode-0", load_interval_s=0.1, **fields(tmp_path)), deps)
    await service.start()
    directory = Directory(deps.registry, poll_s=0.05)
    await directory.start()
    client = DecodeClient(directory, deps.bus)
    await client.start()
    print_ = (await client.wait_for_workers("tiny", 5))[0].fingerprint
    record = directory.get("decode", "decode-0")
    assert record is not None
    assert record.transports == ()
    scheme = HashScheme(await deps.registry.deployment_key(), "tiny", print_.revision, print_.dtype, print_.block_size)
    hashes = tuple(scheme.chain(scheme.root(), PROMPT))
    for request_id, cached in (("a", 0), ("b", 32)):
        deltas = [delta async for delta in client.generate("decode-0", Generation(
            request_id, "tiny", PROMPT, hashes, SamplingParams(max_tokens=8, ignore_eos=True)))]
        assert (deltas[-1].num_output_tokens, deltas[-1].num_cached_tokens) == (8, cached)
    await client.stop()
    await directory.stop()
    await service.stop()


async def test_a_prefill_worker_whose_kv_cannot_leave_does_not_start(tmp_path: Path) -> None:
    service = build_prefill(
        PrefillConfig(service_id="prefill-0", **fields(tmp_path)), Deps(MemoryBus(), MemoryRegistry()))
    with pytest.raises(ConfigError, match="run mixed workers on GPUs"):
        await service.start()
    await service.stop()
