"""Request times and token sources of a decode worker, by a clock of the test."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from common.errors import Cancelled, Overloaded
from common.generation import FinishReason, Generation
from common.sampling_params import SamplingParams
from decode_svc.request_meter import RequestMeter
from decode_svc.request_metrics import RequestMetrics
from engine.outputs import RequestOutput


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def generation(request_id: str, n: int = 1) -> Generation:
    return Generation(request_id=request_id, model="m", prompt_token_ids=(1,) * 32, block_hashes=(),
                      params=SamplingParams(max_tokens=4, n=n, seed=1))


def output(
    request_id: str, num: int, end: FinishReason | None = None, cached: int = 0, choice: int = 0
) -> RequestOutput:
    return RequestOutput(request_id, (7,), end, num_prompt_tokens=32, num_cached_tokens=cached, num_output_tokens=num,
                         queue_s=.25, choice=choice)


def meter() -> tuple[RequestMeter, Clock]:
    clock = Clock()
    return RequestMeter(clock), clock


def test_the_times_of_a_request_add_up() -> None:
    it, clock = meter()
    it.submitted(generation("a"))
    for at, num in ((101.0, 1), (101.1, 2), (101.3, 3)):
        clock.now = at
        it.on_outputs([output("a", num, FinishReason.LENGTH if num == 3 else None)])
    counts = it.counts
    assert round(counts.ttft.sum, 6) == 1.0
    assert (counts.itl.count, round(counts.itl.sum, 6)) == (2, .3)
    assert round(counts.tpot.sum, 6) == .15
    assert round(counts.e2e.sum, 6) == 1.3
    assert round(counts.queue.sum + counts.prefill.sum + counts.decode.sum, 6) == round(counts.e2e.sum, 6)
    assert counts.output_tokens.sum == 3
    assert it.num_live == 0


def test_a_gap_counts_once_for_each_request_that_had_a_token_before() -> None:
    it, clock = meter()
    for request_id in "abc":
        it.submitted(generation(request_id))
    it.on_outputs([output("a", 1), output("b", 1)])
    assert it.counts.itl.count == 0
    clock.now += .5
    it.on_outputs([output("a", 2), output("b", 2), output("c", 1)])
    assert (it.counts.itl.count, it.counts.itl.sum) == (2, 1.0)


def test_a_row_that_was_preempted_counts_its_whole_gap_while_others_go_on() -> None:
    it, clock = meter()
    for request_id in "ab":
        it.submitted(generation(request_id))
    it.on_outputs([output("a", 1), output("b", 1)])
    for num in (2, 3):
        clock.now += .5
        it.on_outputs([output("b", num)])
    clock.now += .5
    it.on_outputs([output("a", 2), output("b", 4)])
    assert (it.counts.itl.count, it.counts.itl.sum) == (4, 3 * .5 + 1.5)
    clock.now += .5
    it.on_outputs([output("a", 3), output("b", 5)])
    assert (it.counts.itl.count, it.counts.itl.sum) == (6, 3 * .5 + 1.5 + 2 * .5)


def test_a_step_that_brings_only_ends_is_no_token_for_the_others() -> None:
    it, clock = meter()
    for request_id in "ab":
        it.submitted(generation(request_id))
    it.on_outputs([output("a", 1), output("b", 1)])
    clock.now += .5
    it.on_outputs([RequestOutput("b", (), FinishReason.ABORT)])
    clock.now += .5
    it.on_outputs([output("a", 2)])
    assert (it.counts.itl.count, it.counts.itl.sum) == (1, 1.0)


def test_the_first_token_of_each_choice_is_no_gap() -> None:
    it, clock = meter()
    for request_id in "ab":
        it.submitted(generation(request_id, n=4))
    it.on_outputs([output("b", 1, choice=choice) for choice in range(4)])
    clock.now += .5
    it.on_outputs([output("a", 1, choice=choice) for choice in range(3)])
    assert it.counts.itl.count == 0
    clock.now += .5
    it.on_outputs([output("a", 2, choice=0), output("a", 1, choice=3)])
    assert (it.counts.itl.count, it.counts.itl.sum) == (1, .5)


def test_rows_of_requests_that_ended_are_not_kept() -> None:
    it, clock = meter()
    for request_id, n in (("a", 2), ("b", 1), ("c", 1)):
        it.submitted(generation(request_id, n))
    it.on_outputs([output("a", 1), output("a", 1, choice=1), output("b", 1), output("c", 1)])
    it.on_outputs([output("c", 2)])
    it.on_outputs([RequestOutput("a", (), FinishReason.ERROR, error=Overloaded("full", retry_after_s=1.0))])
    it.on_outputs([RequestOutput("b", (), FinishReason.ABORT)])
    it.on_outputs([output("c", 3, FinishReason.STOP)])
    it.submitted(generation("b"))
    clock.now += 9
    it.on_outputs([output("b", 1)])
    assert it.counts.itl.sum == 0
    assert (it._rows, it._away) == ({("b", 0)}, {})


def test_prompt_tokens_are_counted_by_their_source_once() -> None:
    it, _ = meter()
    for request_id in "ab":
        it.submitted(generation(request_id))
    it.brought("a", device=4, store=8, remote=16)
    it.on_outputs([output("a", 1, cached=28), output("b", 1, cached=10)])
    it.on_outputs([output("a", 2, cached=28), output("b", 2, cached=10)])
    assert it.counts.tokens_by_source == {"device": 14, "store": 8, "remote": 16, "computed": 4 + 22}
    assert it.counts.prompt_tokens.sum == 64


def test_a_request_with_choices_ends_with_its_last() -> None:
    it, _ = meter()
    it.submitted(generation("a", n=2))
    it.on_outputs([output("a", 1, choice=0), output("a", 1, choice=1)])
    it.on_outputs([output("a", 2, FinishReason.STOP, choice=0)])
    assert it.num_live == 1
    it.on_outputs([output("a", 3, FinishReason.STOP, choice=1)])
    assert it.num_live == 0
    assert (it.counts.ttft.count, it.counts.e2e.count, it.counts.output_tokens.count) == (1, 1, 2)


def test_refusals_and_faults_leave_nothing_behind_and_are_counted_but_for_cancelled_ones() -> None:
    it, _ = meter()
    for request_id in "abc":
        it.submitted(generation(request_id))
    it.refused("a", Overloaded("full", retry_after_s=1.0))
    it.refused("b", Cancelled("gone"))
    it.on_outputs([RequestOutput("c", (), FinishReason.ERROR, error=Overloaded("full", retry_after_s=1.0))])
    it.on_outputs([RequestOutput("c", (), FinishReason.ABORT)])
    assert it.num_live == 0
    assert {code: n for code, n in it.counts.refused.items() if n} == {"server_is_overloaded": 2}
    assert it.counts.ttft.count == it.counts.e2e.count == 0


def test_vllms_names_are_there_only_where_asked() -> None:
    it, _ = meter()
    it.submitted(generation("a"))
    it.on_outputs([output("a", 1)])
    for vllm_names in (True, False):
        registry = CollectorRegistry()
        registry.register(RequestMetrics(it.counts, "m", vllm_names=vllm_names))
        labels = {"model_name": "m", "engine": "0"}
        assert registry.get_sample_value("shoal_worker_ttft_seconds_count", {"model_name": "m"}) == 1
        aliased = registry.get_sample_value("vllm:time_to_first_token_seconds_count", labels)
        assert aliased == (1 if vllm_names else None)
