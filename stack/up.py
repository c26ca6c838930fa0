"""`shoal up`: the one-host stack, from options to the last child gone.

States: checking (ports, folders, model) → starting → ready → stopping → stopped. The first SIGINT, SIGTERM or SIGHUP
stops in order, also while starting; the second kills. The state folder is claimed, and the folder in shared memory
emptied, before anything is started; the latter goes when all children have gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from common.errors import Unavailable
from stack import ports
from stack.child import ChildSpec
from stack.console import Console
from stack.gates import RegistryGates, ask
from stack.plan import StackOptions, service_specs
from stack.servers import nats_spec, valkey_spec
from stack.shm_folder import hold_shm_dir
from stack.state_file import ProcessState, StackState, claim
from stack.supervisor import Supervisor

_SERVING_TIMEOUT_S = 30.0


def up(options: StackOptions, console: Console) -> None:
    """Run until told to stop. Raises `ConfigError` before, `Unavailable` while starting."""
    with claim(options.state_dir):
        for port in options.gateway_ports:
            ports.require_free(options.host, port)
        with hold_shm_dir(options.state_dir) as shm_dir:
            asyncio.run(_Run(options, shm_dir, console).main())


@dataclass(frozen=True, slots=True)
class _Servers:
    nats_url: str
    redis_url: str
    specs: list[ChildSpec]


def _servers(options: StackOptions) -> _Servers:
    """The given servers, embedded ones in place of those not given."""
    specs, nats_url, redis_url = [], options.nats_url, options.redis_url
    if not nats_url:
        port = ports.free_port("127.0.0.1")
        nats_url = f"nats://127.0.0.1:{port}"
        specs.append(nats_spec(port, options.state_dir / "nats"))
    if not redis_url:
        port = ports.free_port("127.0.0.1")
        redis_url = f"redis://127.0.0.1:{port}/0"
        specs.append(valkey_spec(port, options.state_dir / "valkey"))
    return _Servers(nats_url, redis_url, specs)


class _Run:
    """One life of the stack."""

    def __init__(self, options: StackOptions, shm_dir: Path, console: Console) -> None:
        self._options, self._shm_dir, self._console = options, shm_dir, console
        self._servers = _servers(options)
        self._gates = RegistryGates(self._servers.redis_url)
        self._state = "starting"
        self._log_dir = options.state_dir / "logs"
        services = service_specs(
            options, shm_dir, self._servers.nats_url, self._servers.redis_url, self._gates.gate)
        specs = [*self._servers.specs, *services]
        self._supervisor = Supervisor(specs, self._log_dir, console, self._save)

    async def main(self) -> None:
        signals: asyncio.Queue[int] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
        told = asyncio.create_task(signals.get())
        starting = asyncio.create_task(self._start())
        try:
            await asyncio.wait({told, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await told
        finally:
            told.cancel()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._stop(signals)

    async def _start(self) -> None:
        began = time.monotonic()
        await self._supervisor.start()
        await self._serving()
        self._enter("ready")
        print(self._banner(time.monotonic() - began), flush=True)

    async def _serving(self) -> None:
        """Each gateway says that requests can be answered from end to end."""
        deadline = time.monotonic() + _SERVING_TIMEOUT_S
        host = self._options.url.partition("://")[2].rsplit(":", 1)[0].strip("[]")
        question = f"GET /ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        tls = self._options.http_tls
        for port in self._options.gateway_ports:
            while b" 200 " not in (answer := await ask(host, port, question, tls=tls)).split(b"\r\n", 1)[0]:
                if time.monotonic() > deadline:
                    said = answer.decode("utf-8", "replace").strip().splitlines() or ["no answer"]
                    raise Unavailable(f"the gateway on port {port} is up but not ready after "
                                      f"{_SERVING_TIMEOUT_S:g} s: {said[0]}; {said[-1]}")
                await asyncio.sleep(0.1)

    async def _stop(self, signals: asyncio.Queue[int]) -> None:
        was_ready = self._state == "ready"
        self._enter("stopping")
        if was_ready:
            self._console.say("draining, then stopping; once more kills")
        again = asyncio.create_task(signals.get())
        stopping = asyncio.create_task(self._supervisor.stop())
        await asyncio.wait({again, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            self._supervisor.kill()
        again.cancel()
        await stopping
        await self._gates.close()
        if was_ready:
            self._console.say("stopped")

    def _enter(self, state: str) -> None:
        self._state = state
        self._save()

    def _save(self) -> None:
        options, servers = self._options, self._servers
        processes = {
            child.spec.name: ProcessState(child.state, child.pid, child.restarts, child.ready.address,
                                          child.ready.metrics_address, child.ready.incarnation)
            for child in self._supervisor.children}
        StackState(os.getpid(), self._state, options.url, options.model_name, servers.nats_url, servers.redis_url,
                   str(self._log_dir), processes, str(self._shm_dir)).save(options.state_dir)

    def _banner(self, took_s: float) -> str:
        options = self._options
        key = ' \\\n    -H "Authorization: Bearer $SHOAL_API_KEY"' if options.api_key else ""
        body = f'{{"model": "{options.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        return (
            f"\nshoal is ready after {took_s:.1f} s\n"
            f"  API    {options.url}/v1\n"
            f"  model  {options.model_name}\n"
            f"  state  {_short(options.state_dir)} (logs in {_short(self._log_dir)})\n\n"
            f"  curl {options.url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n    -d '{body}'\n\n"
            f"  Ctrl-C drains and stops; in another terminal: shoal chat, shoal status, shoal smoke\n")


def _short(path: Path) -> str:
    home = str(Path.home())
    return str(path).replace(home, "~", 1) if str(path).startswith(home + "/") else str(path)
