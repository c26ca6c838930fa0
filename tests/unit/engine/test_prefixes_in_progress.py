from __future__ import annotations

from engine.prefixes_in_progress import PrefixesInProgress
from engine.request import Request
from tests.unit.engine.builders import Engine, ask, oracle, prompt, scheme


def begun(prefixes: PrefixesInProgress, name: str, step_id: int) -> Request:
    """It moved in that step."""
    request = Request(ask(name, prompt(40)), scheme())
    request.last_step_id, request.num_chunk_rows = step_id, 1
    prefixes.add(request)
    return request


def test_whoever_moves_is_waited_for_though_another_that_began_before_stands_still() -> None:
    prefixes = PrefixesInProgress(16)
    still, moves = begun(prefixes, "still", 1), begun(prefixes, "moves", 5)
    block_hash = still.block_hashes[1]
    assert prefixes.is_coming(block_hash, 6)
    prefixes.remove(moves)
    assert not prefixes.is_coming(block_hash, 6)
    still.last_step_id = 6
    assert prefixes.is_coming(block_hash, 7)
    prefixes.remove(still)
    assert not prefixes.is_coming(block_hash, 7)


def test_whole_engine_nothing_is_kept_of_preempted_and_resumed_ones() -> None:
    engine = Engine(num_blocks=14, max_num_seqs=8)
    engine.run(*(ask(f"r{i}", prompt(20, first=i), max_tokens=60) for i in range(4)))
    assert engine.core.stats().num_preemptions > 0
    engine.run(ask("resumed", prompt(20), 70, output_token_ids=oracle(prompt(20), 60)))
    assert len(engine.core._roster.prefixes) == 0
