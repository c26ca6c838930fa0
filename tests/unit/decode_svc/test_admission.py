from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from common.block_hash import BlockHash
from common.generation import Generation, TokenDelta
from common.placement import Placement
from common.sampling_params import SamplingParams
from decode_svc.admission import KvAdmission
from decode_svc.worker import DecodeWorker
from engine.core import Reservation
from engine.kv_transfer.receiver import Received, Route
from engine.request import EngineRequest
from tests.unit.engine.builders import Engine, hashes, prompt


class EveryBlock:
    """A store that has all of a prompt, though it is never worth loading."""

    async def blocks_present(self, hashes: Sequence[BlockHash]) -> int:
        return len(hashes)

    def is_worth(self, num_blocks: int) -> bool:
        return False


class Stepped:
    """A core as a port, without a loop."""

    def __init__(self) -> None:
        self.core = Engine(num_blocks=64).core

    def submit(self, request: EngineRequest) -> None:
        self.core.add(request)

    async def reserve(self, request: EngineRequest) -> Reservation:
        return self.core.reserve(request)

    async def start_reserved(self, request_id: str, num_cached_tokens: int | None = None) -> None:
        self.core.start(request_id, num_cached_tokens)


class Nothing:
    """A prefill worker that brings no KV."""

    async def receive(self, *_: Any) -> Received:
        return Received(0, 0)


@pytest.mark.parametrize("placement", [None, Placement("d", prefill_worker_id="p")], ids=["store", "prefill"])
@pytest.mark.parametrize("drawn", [(), (5,)], ids=["new", "resumed"])
async def test_a_request_for_prompt_logprobs_is_computed_here_unless_it_was_scored_before(
    placement: Placement | None, drawn: tuple[int, ...]
) -> None:
    engine, worker = Stepped(), DecodeWorker("m", lambda _: None, lambda _: None)
    admission = KvAdmission(
        engine, EveryBlock(), Nothing(), lambda _: Route("p", "address", "shm"),  # type: ignore[arg-type]
        worker.meter, worker.spans, block_size=16, timeout_s=1.0)
    worker.start(engine, admission)  # type: ignore[arg-type]
    session, tokens = worker.open_session(), tuple(prompt(40))
    session.submit(Generation(
        "r", "m", tokens, tuple(hashes(tokens)), SamplingParams(max_tokens=4, prompt_logprobs=1), placement=placement,
        output_token_ids=drawn))
    while "r" not in engine.core:
        assert await session.next_deltas(0.01) == []
    deltas: list[TokenDelta] = []
    while engine.core.has_work:
        worker.on_outputs(engine.core.step())
        deltas += await session.next_deltas(0.001)
    assert sum(len(delta.token_ids) for delta in deltas) == 4 - len(drawn)
    assert admission.counts.num_plain == (0 if drawn else 1)
    assert max(len(delta.prompt_logprobs) for delta in deltas) == (0 if drawn else 40)
