from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from router_svc.curves import CostCurves, MeasuredCurves, Rates, kv_bytes_per_token
from router_svc.load import WorkerState
from router_svc.pricing import Asked, Priced, PricingRules, choose, price
from tests.unit.router_svc.builders import PRINT, worker

CURVES, RULES = CostCurves(hop_s=0.005, request_s=2.0), PricingRules()
ASKED = Asked(num_prompt_tokens=2000, max_tokens=10, seed="r")


def taken(
    decodes: list[WorkerState], prefills: list[WorkerState] = [], *, asked: Asked = ASKED,  # noqa: B006
    rules: PricingRules = RULES, curves: CostCurves = CURVES,
) -> Priced | None:
    candidates = price(asked, decodes, prefills, curves, rules)
    chosen = choose(candidates, asked.seed, rules)
    return None if chosen is None else candidates[chosen]


def where(choice: Priced | None) -> tuple[str, str]:
    assert choice is not None
    return choice.decode.worker_id, choice.prefill.worker_id if choice.prefill else ""


def test_a_local_price_is_queue_plus_own_tokens_plus_one_step() -> None:
    (only,) = price(ASKED, [worker("d", cached=1200, num_waiting_tokens=300)], [], CURVES, RULES)
    assert (only.source, only.cached_tokens) == ("local", 1200)
    assert (only.queue_s, only.prefill_s, only.transfer_s) == pytest.approx((0.3, 0.8, 0.0))
    assert only.predicted_ttft_s == pytest.approx(0.3 + 0.8 + 0.01)


def test_a_remote_price_takes_prefill_by_the_prefill_workers_hit_and_transfer_by_the_decode_workers() -> None:
    _, remote = price(ASKED, [worker("d", cached=1200)], [worker("p", "prefill", cached=1499)], CURVES, RULES)
    moving_s = 800 * kv_bytes_per_token(PRINT) / 1e8
    assert remote.prefill_s == pytest.approx(0.5)
    assert remote.transfer_s == pytest.approx(0.005 + moving_s / 2)
    assert remote.predicted_ttft_s == pytest.approx(0.5 + remote.transfer_s + 0.01)


def test_the_whole_prompt_is_never_counted_as_cached_since_its_last_token_is_run() -> None:
    (only,) = price(ASKED, [worker("d", cached=2000)], [], CURVES, RULES)
    assert only.cached_tokens == 1999
    assert only.prefill_s == pytest.approx(0.001)


def test_kv_bytes_follow_the_fingerprint() -> None:
    assert kv_bytes_per_token(PRINT) == 2 * 2 * 1 * 8 * 4
    assert kv_bytes_per_token(dataclasses.replace(PRINT, dtype="bfloat16")) == 2 * 2 * 1 * 8 * 2


def test_the_longest_hit_wins_until_its_queue_costs_more_than_the_hit_saves() -> None:
    assert where(taken([worker("hit", cached=1600), worker("cold")]))[0] == "hit"
    assert where(taken([worker("hit", cached=1600, num_waiting_tokens=1000), worker("cold")]))[0] == "hit"
    assert where(taken([worker("hit", cached=1600, num_waiting_tokens=3000), worker("cold")]))[0] == "cold"


def test_the_prefill_worker_with_the_soonest_end_is_taken_at_its_own_measured_rate() -> None:
    prefills = [worker("hit", "prefill", cached=1000, num_waiting_tokens=4000), worker("idle", "prefill"),
                worker("fast", "prefill", prefill_tokens_per_s=9000.0)]
    assert where(taken([worker("d", "decode")], prefills)) == ("d", "fast")
    assert where(taken([worker("d", "decode")], prefills[:2])) == ("d", "idle")
    assert where(taken([worker("d", "decode")], [prefills[0], worker("busy", "prefill", num_waiting_tokens=9000)])) \
        == ("d", "hit")


def test_a_short_uncached_suffix_skips_the_hop() -> None:
    prefills = [worker("p", "prefill", cached=1999, prefill_tokens_per_s=1e6)]
    assert where(taken([worker("d", "decode", cached=1872)], prefills)) == ("d", "")
    assert where(taken([worker("d", "decode", cached=1856)], prefills)) == ("d", "p")


def test_a_decode_worker_leaves_long_prompts_to_prefill_workers_and_a_mixed_one_goes_by_price() -> None:
    assert where(taken([worker("d", "decode", cached=1000)], [worker("p", "prefill")])) == ("d", "p")
    assert where(taken([worker("d", "mixed", cached=1000)], [worker("p", "prefill")])) == ("d", "")
    assert where(taken([worker("d", "mixed", num_waiting_tokens=9000)], [worker("p", "prefill")])) == ("d", "p")


def test_a_decode_worker_computes_a_long_prompt_itself_when_no_hand_off_is_possible_or_all_are_far_too_slow() -> None:
    decode = worker("d", "decode")
    assert where(taken([decode], [])) == ("d", "")
    other = dataclasses.replace(worker("p", "prefill"), fingerprint=dataclasses.replace(PRINT, block_size=32))
    assert where(taken([decode], [other])) == ("d", "")
    assert where(taken([decode], [worker("p", "prefill", draining=True)])) == ("d", "")
    assert where(taken([decode], [worker("p", "prefill", num_blocks=50)])) == ("d", "")
    assert where(taken([decode], [worker("p", "prefill", num_waiting_tokens=4000)])) == ("d", "p")
    assert where(taken([decode], [worker("p", "prefill", num_waiting_tokens=9000)])) == ("d", "")


def test_workers_on_which_the_request_failed_are_not_taken_again() -> None:
    asked = dataclasses.replace(ASKED, exclude=frozenset({"d0", "p0"}))
    decodes = [worker("d0", "decode", cached=1800), worker("d1", "decode")]
    prefills = [worker("p0", "prefill", cached=1999), worker("p1", "prefill")]
    assert where(taken(decodes, prefills, asked=asked)) == ("d1", "p1")
    assert taken(decodes[:1], prefills, asked=asked) is None


@pytest.mark.parametrize(("changes", "why"), [
    ({"num_blocks": 100}, "does not fit its 100 blocks"), ({"draining": True}, "draining")])
def test_what_cannot_be_is_rejected_with_its_reason(changes: dict[str, Any], why: str) -> None:
    (only,) = price(ASKED, [worker("d", **changes)], [], CURVES, RULES)
    assert why in only.rejected_because
    assert taken([worker("d", **changes)]) is None


def test_a_prompt_beyond_the_context_of_a_worker_is_rejected_there() -> None:
    small = dataclasses.replace(worker("d"), max_model_len=2000)
    assert taken([small]) is None
    assert taken([dataclasses.replace(small, max_model_len=2001)]) is not None


def test_a_worker_that_does_not_answer_is_passed_over_while_another_does() -> None:
    mute = dataclasses.replace(worker("d0", cached=1999), answers=False)
    assert where(taken([mute, worker("d1")]))[0] == "d1"
    assert where(taken([mute]))[0] == "d0"
    prefills = [dataclasses.replace(worker("p0", "prefill", cached=1999), answers=False), worker("p1", "prefill")]
    assert where(taken([worker("d", "decode")], prefills)) == ("d", "p1")


def test_near_ties_go_to_the_least_loaded_and_clear_leads_do_not() -> None:
    busy, idle = worker("a", num_running=6, cached=100), worker("b", num_running=1)
    assert where(taken([busy, idle]))[0] == "b"
    assert where(taken([dataclasses.replace(busy, cached_tokens=1500), idle]))[0] == "a"
    assert where(taken([worker("a", placed=1), worker("b")]))[0] == "b"


def test_exact_ties_spread_by_request_and_stay_together_by_affinity() -> None:
    workers = [worker(f"d{i}") for i in range(4)]
    by_request = [where(taken(workers, asked=dataclasses.replace(ASKED, seed=f"r{i}")))[0] for i in range(60)]
    assert set(by_request) == {"d0", "d1", "d2", "d3"}
    assert len({where(taken(workers, asked=dataclasses.replace(ASKED, seed="user-7")))[0] for _ in range(5)}) == 1


def test_a_worker_without_a_seat_or_without_blocks_costs_the_wait_for_them() -> None:
    (seats,) = price(ASKED, [worker("d", num_running=8, num_waiting=3)], [], CURVES, RULES)
    assert seats.queue_s == pytest.approx(4 * 2.0 / 8)
    (blocks,) = price(ASKED, [worker("d", num_free_blocks=25)], [], CURVES, RULES)
    assert blocks.queue_s == pytest.approx(100 * 2.0 / 1000)
    assert where(taken([worker("d", num_free_blocks=0, cached=16), worker("e")]))[0] == "e"


def test_a_limit_between_tokens_passes_over_workers_whose_streams_would_wait_unless_all_would() -> None:
    rules = PricingRules(itl_limit_s=0.1)
    streaming, idle = worker("d", num_running=2, cached=1000), worker("e")
    assert where(taken([streaming, idle]))[0] == "d"
    assert where(taken([streaming, idle], rules=rules))[0] == "e"
    assert where(taken([streaming], rules=rules))[0] == "d"


def test_figures_not_measured_yet_come_from_the_models_other_workers_then_from_the_configuration() -> None:
    measured = MeasuredCurves(CostCurves(prefill_tokens_per_s=500.0, step_s=0.5))
    fresh = worker("d", step_s=0.0, prefill_tokens_per_s=0.0)
    (only,) = price(ASKED, [fresh], [], measured.curves("m"), RULES)
    assert only.predicted_ttft_s == pytest.approx(4.0 + 0.5)
    measured.observe("m", "mixed", Rates(4000.0, 0.0))
    measured.observe("m", "mixed", Rates(4000.0, 0.1))
    (only,) = price(ASKED, [fresh], [], measured.curves("m"), RULES)
    assert only.predicted_ttft_s == pytest.approx(0.5 + 0.1)
    (only,) = price(ASKED, [fresh], [], measured.curves("other"), RULES)
    assert only.predicted_ttft_s == pytest.approx(4.0 + 0.5)


def test_a_new_decode_worker_is_priced_like_the_other_decode_workers_and_not_like_the_prefill_workers() -> None:
    measured = MeasuredCurves(CostCurves())
    measured.observe("m", "prefill", Rates(2000.0, 0.4))
    measured.observe("m", "decode", Rates(2000.0, 0.01, 1e9))
    known = worker("d0", "decode", step_s=0.01, transfer_bytes_per_s=1e9, num_running=2)
    fresh = worker("d1", "decode", step_s=0.0, transfer_bytes_per_s=0.0, prefill_tokens_per_s=0.0)
    assert where(taken([known, fresh], [worker("p", "prefill")], curves=measured.curves("m")))[0] == "d1"


def test_the_same_facts_give_the_same_decision() -> None:
    decodes = [worker(f"d{i}", "decode", cached=16 * i) for i in range(5)]
    prefills = [worker(f"p{i}", "prefill", cached=32 * i) for i in range(6)]
    assert taken(decodes, prefills) == taken(decodes, prefills)
