"""Runs in which all requests are there from the start: decode steps, prefill, throughput, a shared prefix."""

from __future__ import annotations

from collections.abc import Iterator

from bench.figures import Figure
from bench.gpu_engine.peer import beside_peer
from bench.gpu_engine.rig import Rig
from bench.serve import workloads

_BATCHES = (1, 8, 32, 64, 128, 256)
_CONTEXT, _STEPS = 1024, 128
_PREFILLS = ((32, 512), (16, 2048), (8, 8192), (1, 2048), (1, 8192), (1, 16384))


def decode(rig: Rig, shape: str) -> Iterator[Figure]:
    """(time for 129 tokens - time for 1) / 128, best of two in turn, context 1024 to 1152, nothing cached.

    Beside it the mean gap between tokens, from the first to the last, which knows nothing of the prompts.
    """
    for batch in _BATCHES:
        one_s, many_s, gaps_s = list[float](), list[float](), list[float]()
        for _ in range(2):
            rig.fresh()
            one_s.append(rig.run(workloads.random(batch, _CONTEXT, 1))[0])
            rig.fresh()
            seconds, served = rig.run(workloads.random(batch, _CONTEXT, _STEPS + 1))
            many_s.append(seconds)
            last_first = max(entry.token_at[0] for entry in served)
            times = sorted({at for entry in served for at in entry.token_at if at > last_first})
            gaps_s.append((times[-1] - last_first) / len(times))
        yield beside_peer(shape, f"decode step, B={batch}", (min(many_s) - min(one_s)) / _STEPS * 1e3, "ms")
        yield Figure(f"gap between tokens, B={batch}", min(gaps_s) * 1e3, "ms")


def prefill(rig: Rig, shape: str) -> Iterator[Figure]:
    """Prompts of which each draws one token, best of two: several in tokens a second, one in milliseconds."""
    for num, length in _PREFILLS:
        seconds = _best_s(rig, num, length, 1)
        value, unit = (seconds * 1e3, "ms") if num == 1 else (num * length / seconds, "tokens/s")
        yield beside_peer(shape, f"prefill {num} x {length}", value, unit)


def mixed(rig: Rig, shape: str) -> Iterator[Figure]:
    """Throughput: 512 requests at once, lengths 100 to 1024."""
    rig.fresh()
    requests = workloads.mixed()
    seconds, _ = rig.run(requests)
    yield beside_peer(shape, "mixed", sum(request.output_len for request in requests) / seconds, "tokens/s")


def shared_prefix(rig: Rig, shape: str) -> Iterator[Figure]:
    """256 prompts with 4096 tokens in common: nothing cached, then all."""
    rig.fresh()
    requests = workloads.shared_prefix()
    for state in ("cold", "warm"):
        seconds, _ = rig.run(requests)
        yield beside_peer(shape, f"shared prefix, {state}", seconds, "s")


def _best_s(rig: Rig, num: int, prompt_len: int, output_len: int) -> float:
    seconds = []
    for _ in range(2):
        rig.fresh()
        seconds.append(rig.run(workloads.random(num, prompt_len, output_len))[0])
    return min(seconds)
