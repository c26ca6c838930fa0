from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from common.errors import Unavailable
from stack.child import ChildSpec, Gate, Ready, RestartPolicy
from stack.console import Console
from stack.supervisor import Supervisor

WAIT_S = 20.0
QUICK = RestartPolicy(least_s=0.01, cap_s=0.05)

OBEDIENT = """
import pathlib, signal, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def leave(*_):
    with (folder / "order").open("a") as order: order.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
with (folder / f"{name}.lives").open("a") as lives: lives.write("x")
print("hello from", name, flush=True)
while True: time.sleep(0.05)
"""
STUBBORN = OBEDIENT.replace("sys.exit(0)", "return")
DOOMED = "import sys; print('no model here', flush=True); sys.exit(3)"
PARENT = """
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
pathlib.Path(sys.argv[2], 'grandchild').write_text(str(child.pid))
time.sleep(600)
"""


def spec(folder: Path, name: str, code: str = OBEDIENT, rank: int = 1, stop_s: float = 10.0,
         start_s: float = WAIT_S, gate: Gate | None = None) -> ChildSpec:
    """Ready when it has counted its life in a file."""

    lives = 0

    async def counted(_spawned: float) -> Ready | None:
        nonlocal lives
        path = folder / f"{name}.lives"
        now = len(path.read_text()) if path.exists() else 0
        if now <= lives:
            return None
        lives = now
        return Ready(incarnation=str(now))

    return ChildSpec(name, rank, (sys.executable, "-c", code, name, str(folder)), gate or counted,
                     start_timeout_s=start_s, stop_timeout_s=stop_s)


async def at_once(_spawned: float) -> Ready | None:
    return Ready()


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not met():
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


class Started:
    """Builds supervisors; whatever a test leaves running is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, io.StringIO()
        self._made: list[Supervisor] = []

    def supervisor(self, *specs: ChildSpec, policy: RestartPolicy = QUICK) -> Supervisor:
        made = Supervisor(specs, self.folder / "logs", Console(out=self.out), policy=policy)
        self._made.append(made)
        return made

    async def clean(self) -> None:
        for each in self._made:
            each.kill()
            await each.stop()


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Started]:
    made = Started(tmp_path)
    yield made
    await made.clean()


async def test_a_child_that_dies_is_started_again_and_counts_its_restarts(started: Started) -> None:
    supervisor = started.supervisor(spec(started.folder, "worker"))
    await supervisor.start()
    child = supervisor.children[0]
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.restarts == 1 and child.state == "ready")
    assert child.pid != first
    assert child.ready.incarnation == "2"
    assert "worker was killed by SIGKILL" in started.out.getvalue()


async def test_a_restart_that_fails_is_tried_again(started: Started) -> None:
    flag = started.folder / "broken"
    code = f"import pathlib, sys\nif pathlib.Path({str(flag)!r}).exists(): sys.exit('still broken')\n{OBEDIENT}"
    supervisor = started.supervisor(spec(started.folder, "worker", code))
    await supervisor.start()
    child = supervisor.children[0]
    flag.touch()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: child.restarts >= 2)
    flag.unlink()
    await until(lambda: child.state == "ready")
    assert "still broken" in started.out.getvalue()


async def test_a_child_that_exits_while_starting_fails_the_start_with_its_last_lines(started: Started) -> None:
    supervisor = started.supervisor(spec(started.folder, "good"), spec(started.folder, "bad", DOOMED))
    with pytest.raises(Unavailable, match=r"bad exited with code 3 while starting(.|\n)*no model here"):
        await supervisor.start()
    await supervisor.stop()
    assert all(child.pid is None for child in supervisor.children)


async def test_a_command_that_does_not_exist_fails_the_start_and_is_named(started: Started) -> None:
    supervisor = started.supervisor(ChildSpec("ghost", 1, ("/no/such/program",), spec(started.folder, "x").gate))
    with pytest.raises(Unavailable, match="cannot run /no/such/program: No such file"):
        await supervisor.start()


async def test_a_gate_that_never_opens_fails_the_start_at_its_deadline(started: Started) -> None:
    async def shut(_spawned: float) -> Ready | None:
        return None

    supervisor = started.supervisor(spec(started.folder, "slow", start_s=0.5, gate=shut))
    with pytest.raises(Unavailable, match=r"slow was not ready within 0\.5 s"):
        await supervisor.start()
    assert supervisor.children[0].pid is None


async def test_rank_zero_is_ready_before_the_rest_is_spawned(started: Started) -> None:
    ready_at: dict[str, float] = {}
    spawned_at: dict[str, float] = {}

    def noted(name: str) -> Gate:
        async def gate(spawned: float) -> Ready | None:
            spawned_at[name] = spawned
            if time.time() - spawned < 0.3:
                return None
            ready_at[name] = time.time()
            return Ready()

        return gate

    supervisor = started.supervisor(*(spec(started.folder, name, rank=rank, gate=noted(name))
                                      for name, rank in (("service", 1), ("server", 0), ("other", 2))))
    await supervisor.start()
    assert ready_at["server"] <= min(spawned_at["service"], spawned_at["other"])
    assert max(spawned_at["service"], spawned_at["other"]) < min(ready_at["service"], ready_at["other"])


async def test_stopping_goes_from_the_highest_rank_down(started: Started) -> None:
    supervisor = started.supervisor(*(spec(started.folder, name, rank=rank)
                                      for name, rank in (("nats", 0), ("gateway", 3), ("tokenizer", 1), ("decode", 2))))
    await supervisor.start()
    await supervisor.stop()
    assert (started.folder / "order").read_text().split() == ["gateway", "decode", "tokenizer", "nats"]
    assert {child.state for child in supervisor.children} == {"stopped"}


async def test_a_child_that_does_not_drain_is_killed_and_said_so(started: Started) -> None:
    supervisor = started.supervisor(spec(started.folder, "stubborn", STUBBORN, stop_s=0.3))
    await supervisor.start()
    pid = supervisor.children[0].pid
    await supervisor.stop()
    assert pid is not None
    assert not alive(pid)
    assert "stubborn did not drain within 0.3 s: killed" in started.out.getvalue()


async def test_what_a_child_started_does_not_outlive_it(started: Started) -> None:
    note = started.folder / "grandchild"
    supervisor = started.supervisor(spec(started.folder, "parent", PARENT, gate=at_once))
    await supervisor.start()
    await until(lambda: note.exists() and note.read_text() != "")
    grandchild = int(note.read_text())
    assert alive(grandchild)
    await supervisor.stop()
    await until(lambda: not alive(grandchild))


async def test_stop_during_back_off_starts_nothing_again(started: Started) -> None:
    supervisor = started.supervisor(spec(started.folder, "worker"), policy=RestartPolicy(least_s=600, cap_s=600))
    await supervisor.start()
    child = supervisor.children[0]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: child.state == "down")
    await supervisor.stop()
    assert child.state == "stopped"
    assert (started.folder / "worker.lives").read_text() == "x"


SUPERVISOR = """
import asyncio, io, pathlib, sys
from stack.child import ChildSpec, Ready
from stack.console import Console
from stack.supervisor import Supervisor
folder = pathlib.Path(sys.argv[1])
code = 'import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)'
def child(name):
    async def gate(_): return Ready() if (folder / name).exists() else None  # past the leash, in the command itself
    return ChildSpec(name, 1, (sys.executable, '-c', code, str(folder / name)), gate)
async def main():
    supervisor = Supervisor([child(f'c{i}') for i in range(3)], folder, Console(out=io.StringIO()))
    await supervisor.start()
    print(*(child.pid for child in supervisor.children), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_a_supervisor_killed_with_sigkill_leaves_no_orphans(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        run.kill()
    deadline = time.monotonic() + WAIT_S
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


def test_the_wait_between_restarts_doubles_up_to_the_cap() -> None:
    policy = RestartPolicy(least_s=0.5, cap_s=3.0)
    assert [policy.delay_s(deaths) for deaths in (1, 2, 3, 4, 100)] == [0.5, 1.0, 2.0, 3.0, 3.0]


async def test_the_back_off_starts_over_after_a_healthy_while(started: Started) -> None:
    policy = RestartPolicy(least_s=0.01, cap_s=60.0, healthy_s=0.0)
    supervisor = started.supervisor(spec(started.folder, "worker"), policy=policy)
    await supervisor.start()
    child = supervisor.children[0]
    for life in range(1, 5):
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda n=life: child.restarts == n and child.state == "ready")  # type: ignore[misc]
    assert started.out.getvalue().count("again in 0.01 s") == 4
