from __future__ import annotations

import asyncio
import threading

import pytest

from common.service_record import Fingerprint
from engine.async_engine import AsyncEngine
from engine.core import EngineCore
from engine.engine_port import EngineFacts
from tests.unit.engine.builders import Engine, ask, prompt
from tests.unit.engine.process.test_client import Heard


async def test_a_call_runs_although_whoever_awaited_it_is_cancelled() -> None:
    core = Engine().core
    facts = EngineFacts(Fingerprint("m", "r", "float32", 16, 1, 1, 8), {}, core.block_bytes)
    engine = AsyncEngine(core, Heard(), facts)
    engine.start()
    go_on = threading.Event()

    def hold(_: EngineCore) -> None:
        assert go_on.wait(10)

    holding = asyncio.create_task(engine.call(hold))
    calls = [asyncio.create_task(engine.reserve(ask("r", prompt(20)))),
             asyncio.create_task(engine.call(lambda core: core.reserve(ask("s", prompt(20)))))]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    go_on.set()
    await holding
    assert await engine.call(lambda core: ("r" in core, "s" in core)) == (True, True)
    await engine.stop()
