"""A second replica of any service beside a stack that runs: a process of the test, on the stack's NATS and Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Self

from common.registry import RedisRegistry
from common.service_record import ServiceRecord
from stack.child import Ready
from stack.plan import StackOptions, service_specs
from stack.ports import free_port
from tests.stack import RunningStack

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 30.0, 30.0


def _no_gate(_service: str, _service_id: str):  # type: ignore[no-untyped-def]
    async def gate(_spawned_unix_s: float) -> Ready | None:
        return None

    return gate


class Replica:
    """`<kind>-1`, planned as `shoal up` would have. Ready on entry; `drain` ends it, leaving ends it in any case."""

    def __init__(
        self, stack: RunningStack, kind: str, folder: Path, model: Path, runner: str, env: dict[str, str]
    ) -> None:
        options = StackOptions(
            model_path=model, state_dir=folder, runner=runner, port=free_port("127.0.0.1") - 1, prefill=2, decode=2,
            mixed=0, kvstore=2, router=2, gateway=2, tokenizer=2, kvstore_dram_bytes=64 << 20,
            kvstore_ssd_bytes=64 << 20)
        state = stack.state
        specs = service_specs(options, Path(state.shm_dir), state.nats_url, state.redis_url, _no_gate)
        self.name, self._redis_url = f"{kind}-1", state.redis_url
        self._spec = next(spec for spec in specs if spec.name == self.name)
        self._log_path, self._env = folder / f"{self.name}.log", env
        self._process: asyncio.subprocess.Process | None = None
        self.record: ServiceRecord | None = None

    async def __aenter__(self) -> Self:
        with self._log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._spec.argv, env={**os.environ, **self._env, **self._spec.env}, cwd=ROOT, stdout=log, stderr=log)
        try:
            await self._registered()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                        _trace: TracebackType | None) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
            await asyncio.wait_for(self._process.wait(), STOP_S)

    async def drain(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self._process.wait(), STOP_S)

    async def _registered(self) -> None:
        assert self._process is not None
        registry = await RedisRegistry.connect(self._redis_url, 5)
        try:
            async with asyncio.timeout(START_S):
                while self.record is None:
                    assert self._process.returncode is None, self._log_path.read_text()
                    self.record = next((r for r in await registry.list() if r.service_id == self.name), None)
                    await asyncio.sleep(0.05)
        finally:
            await registry.close()
