"""Decode steps of 64 requests under a JSON schema beside free ones: what masks cost."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.figures import Figure
from bench.gpu_engine.rig import Rig
from bench.gpu_engine.wide_tokenizer import write_wide_tokenizer
from bench.serve import workloads
from common.grammar import Grammar, GrammarKind
from engine.grammar.compiler import GrammarCompiler

_BATCH, _CONTEXT, _STEPS, _LEAD, _ROUNDS = 64, 1024, 100, 20, 3
_LIMIT: Final = 1.05
# No end within the steps, and no place where only one text can follow.
_SCHEMA: Final = {"type": "array", "minItems": 2000,
                  "items": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]}}


def structured(rig: Rig, _shape: str) -> Iterator[Figure]:
    """Medians over rounds in turn. Raises `RuntimeError` for an answer that the schema does not allow."""
    with tempfile.TemporaryDirectory() as folder:
        write_wide_tokenizer(Path(folder), rig.runner.vocab_size)
        compiler = GrammarCompiler(Path(folder), rig.runner.vocab_size, rig.runner.eos_token_ids)
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA))
        compiler.compile(grammar)
        free, masked = list[float](), list[float]()
        for _ in range(_ROUNDS):
            free.append(_step_s(rig, None, grammar))
            masked.append(_step_s(rig, compiler, grammar))
    ratio = statistics.median(masked) / statistics.median(free)
    yield Figure(f"decode step under a JSON schema, B={_BATCH}", statistics.median(masked) * 1e3, "ms", "free",
                 statistics.median(free) * 1e3, 1 / ratio, 1 / _LIMIT)


def _step_s(rig: Rig, compiler: GrammarCompiler | None, grammar: Grammar) -> float:
    """The mean over steps in which all decode."""
    rig.fresh()
    drawn: dict[str, list[int]] = {}
    for request in workloads.random(_BATCH, _CONTEXT, _STEPS + 4 * _LEAD):
        drawn[rig.add(request, compiler.compile(grammar) if compiler else None)] = []

    def step() -> None:
        for output in rig.core.step():
            drawn[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                raise RuntimeError(f"{output.request_id} ended early by {output.finish_reason}: {output.error}")

    while not all(drawn.values()):
        step()
    for _ in range(_LEAD):
        step()
    started = time.perf_counter()
    for _ in range(_STEPS):
        step()
    seconds = (time.perf_counter() - started) / _STEPS
    for name in drawn:
        rig.core.abort(name)
    while rig.core.has_work:
        rig.core.step()
    if compiler is not None:
        for token_ids in drawn.values():
            compiler.compile(grammar).accept(token_ids)  # refuses what does not follow the schema
    return seconds
