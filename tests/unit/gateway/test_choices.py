"""Choices of one order: interleaved, each with its own text and ending, resumed each by itself; in front of fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ContextLengthExceeded, InternalError, InvalidRequest, Overloaded, Unavailable, WorkerLost
from common.generation import FinishReason, Generation, ModelFacts, TokenDelta, TokenLogprobs, WorkerView
from common.placement import Placement, RequestOutcome, RouteQuery
from gateway import metrics
from gateway.attempts import AttemptLimits
from gateway.batch import run_all
from gateway.order import Ending, Order, Usage
from gateway.pipeline import Pipeline, PipelineLimits
from tests.fakes import EOS, FINGERPRINT, MODEL, FakeDecode, FakeTokenizer, Step, fake_logprobs, says

ORDER = Order("r1", ModelFacts(MODEL, 512, 1), "hi", 100)
WORDS = ("alpha", "beta", "gamma", "delta")


@dataclass
class Told:
    """What a reader has of one choice."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    ending: Ending | None = None
    num_firsts: int = 0


def pipeline(decode: FakeDecode, tokenizer: FakeTokenizer | None = None, router: Any = None) -> Pipeline:
    return Pipeline(tokenizer or FakeTokenizer(), decode, router, PipelineLimits(AttemptLimits(0.3, 3), 16))


async def told(decode: FakeDecode, *orders: Order, router: Any = None) -> tuple[dict[int, Told], Usage]:
    """All of a call, and its last usage. A choice says nothing after its ending."""
    out: dict[int, Told] = {}
    usage = Usage(0, 0, 0)
    end = asyncio.get_running_loop().time() + 5
    async for event in run_all(pipeline(decode, router=router), orders, end, 4):
        choice, usage = out.setdefault(event.choice, Told()), event.usage
        assert choice.ending is None
        if isinstance(event, Ending):
            choice.ending = event
            continue
        choice.text += event.text
        choice.ids += event.token_ids
        choice.logprobs += event.logprobs
        if event.prompt_token_ids:
            choice.num_firsts += 1
            choice.prompt_ids, choice.prompt_logprobs = event.prompt_token_ids, event.prompt_logprobs
    assert all(choice.num_firsts == 1 and choice.ending is not None for choice in out.values())
    return out, usage


def each_says(texts: Sequence[str], per_step: int = 1) -> Any:
    """Each choice has a text of its own, and goes on after the tokens it is given."""

    def script(_worker: str, generation: Generation) -> list[Step]:
        raw = list(texts[generation.choice % len(texts)].encode())[len(generation.output_token_ids) :]
        return [raw[i : i + per_step] for i in range(0, len(raw), per_step)]

    return script


def workers(number: int) -> list[WorkerView]:
    return [WorkerView(f"w{i}", MODEL, FINGERPRINT, 512, 8, num_free_blocks=9, incarnation="a") for i in range(number)]


async def test_choices_interleave_each_with_its_text_one_ending_and_a_share_of_the_usage() -> None:
    out, usage = await told(FakeDecode(each_says(WORDS)), replace(ORDER, n=4))
    assert [out[i].text for i in range(4)] == list(WORDS)
    assert usage == Usage(2, 0, sum(len(word) + 1 for word in WORDS))
    assert {choice.ending.finish_reason for choice in out.values() if choice.ending} == {FinishReason.STOP}


async def test_choices_take_turns_in_the_stream() -> None:
    order: list[int] = []
    async for event in pipeline(FakeDecode(says("abcdefgh"))).run(replace(ORDER, n=2), 1e9):
        order.append(event.choice)
    assert 1 in order[: len(order) // 2]
    assert 0 in order[len(order) // 2 :]


async def test_a_stop_string_ends_its_own_choice_only_and_the_last_one_closes_the_workers_stream() -> None:
    decode = FakeDecode(each_says(("ab|cd", "abcdefgh|ij", "no stop")))
    out, usage = await told(decode, replace(ORDER, n=3, stop=("|",)))
    assert [out[i].text for i in range(3)] == ["ab", "abcdefgh", "no stop"]
    assert [out[i].ending.stop_reason for i in range(3)] == ["|", "|", None]  # type: ignore[union-attr]
    assert usage.num_output_tokens == 3 + 9 + 8
    decode = FakeDecode(each_says(("a|" + "x" * 90, "bc|" + "y" * 90)))
    out, _ = await told(decode, replace(ORDER, n=2, stop=("|",)))
    assert [out[i].text for i in range(2)] == ["a", "bc"]
    assert decode.aborted == {"r1"}
    assert decode.num_tokens_sent < 100


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("ab é🙂", max_size=12), min_size=1, max_size=3), per_step=st.integers(1, 5),
    n=st.integers(1, 3), stop=st.lists(st.text("ab é🙂", min_size=1, max_size=3), max_size=2),
    logprobs=st.sampled_from([None, 0, 2]), max_tokens=st.integers(1, 40), returns_ids=st.booleans())
def test_any_cutting_of_tokens_gives_the_same_text_tokens_and_logprobs(
    texts: list[str], per_step: int, n: int, stop: list[str], logprobs: int | None, max_tokens: int, returns_ids: bool
) -> None:
    order = replace(
        ORDER, n=n, stop=tuple(stop), logprobs=logprobs, max_tokens=max_tokens, return_token_ids=returns_ids)
    cut, usage = asyncio.run(told(FakeDecode(each_says(texts, per_step)), order))
    fine, same_usage = asyncio.run(told(FakeDecode(each_says(texts)), order))
    assert usage == same_usage
    if returns_ids or logprobs is not None:
        assert usage.num_output_tokens == sum(len(choice.ids) for choice in cut.values())
    for i in range(n):
        assert (cut[i].text, cut[i].logprobs) == (fine[i].text, fine[i].logprobs)
        if returns_ids or logprobs is not None:
            assert cut[i].ids == fine[i].ids
        assert cut[i].ending.finish_reason == fine[i].ending.finish_reason  # type: ignore[union-attr]
        if logprobs is not None:
            assert cut[i].logprobs == [fake_logprobs(token, logprobs) for token in cut[i].ids]
            assert bytes(t for t in cut[i].ids if t != EOS).decode("utf-8", "replace").startswith(cut[i].text[:-1])


@settings(max_examples=40, deadline=None)
@given(losses=st.lists(st.integers(1, 6), max_size=3), n=st.integers(1, 3), stop=st.sampled_from([(), ("a",)]),
       logprobs=st.sampled_from([None, 1]))
def test_wherever_workers_are_lost_each_choice_goes_on_without_gap_or_repeat(
    losses: list[int], n: int, stop: tuple[str, ...], logprobs: int | None
) -> None:
    whole = each_says(WORDS)

    def script(worker: str, generation: Generation) -> list[Step]:
        steps = whole(worker, generation)
        at = losses[int(worker[1:])] if int(worker[1:]) < len(losses) else None
        return steps if at is None else [*steps[:at], WorkerLost(f"{worker} was lost")]

    order = replace(ORDER, n=n, stop=stop, logprobs=logprobs, prompt_logprobs=logprobs, return_token_ids=True)
    decode = FakeDecode(script, workers_=workers(len(losses) + 1))
    out, usage = asyncio.run(told(decode, order))
    expected, same_usage = asyncio.run(told(FakeDecode(whole), order))
    assert usage == same_usage
    for i in range(n):
        assert (out[i].text, out[i].ids, out[i].logprobs) == (
            expected[i].text, expected[i].ids, expected[i].logprobs)
        assert out[i].prompt_logprobs == expected[i].prompt_logprobs


async def test_after_a_loss_only_open_and_wanted_choices_run_on_each_as_one_of_its_own() -> None:
    whole = each_says(("a", "bb|bbbbbb", "cccccccc"))

    def script(worker: str, generation: Generation) -> list[Step]:
        steps = whole(worker, generation)
        return [*steps, WorkerLost("lost")] if worker == "w0" and generation.choice == 2 else steps

    decode = FakeDecode(script, workers_=workers(2))
    out, _ = await told(decode, replace(ORDER, n=3, stop=("|",), seed=7, prompt_logprobs=0))
    assert [out[i].text for i in range(3)] == ["a", "bb", "cccccccc"]
    first, *resumed = decode.generations
    assert (first.params.n, first.output_token_ids) == (3, ())
    assert [(g.choice, g.params.n, bytes(g.output_token_ids), g.attempt, g.params.seed) for g in resumed] == [
        (2, 1, b"cccccccc", 1, 7)]
    assert [g.params.prompt_logprobs for g in decode.generations] == [0, None], "they are made once"
    assert len({g.request_id for g in decode.generations}) == 2


async def test_choices_that_ran_on_and_find_no_worker_end_the_call_with_one_error() -> None:
    decode = FakeDecode(lambda _w, _g: [b"ab", WorkerLost("lost")], workers_=workers(1))
    with pytest.raises(WorkerLost):
        await told(decode, replace(ORDER, n=3))


async def test_several_choices_lost_before_any_token_are_sent_again_together() -> None:
    def script(worker: str, _generation: Generation) -> list[Step]:
        return [Unavailable("gone")] if worker == "w0" else [b"ok"]

    decode = FakeDecode(script, workers_=workers(2))
    out, _ = await told(decode, replace(ORDER, n=2))
    assert [out[i].text for i in range(2)] == ["ok", "ok"]
    assert [g.params.n for g in decode.generations] == [2, 2]


async def test_a_choice_without_tokens_yet_waits_for_a_full_worker_as_its_begun_mates_do() -> None:
    full = 4

    def script(worker: str, generation: Generation) -> list[Step]:
        nonlocal full
        if worker == "w0":
            return [WorkerLost("lost")] if generation.choice else [b"a", b"b"]
        if full:
            full -= 1
            return [Overloaded("full", retry_after_s=1.0)]
        return each_says(("ab", "cd"))(worker, generation)  # type: ignore[no-any-return]

    out, _ = await told(FakeDecode(script, workers_=workers(2)), replace(ORDER, n=2))
    assert [out[i].text for i in range(2)] == ["ab", "cd"]
    assert full == 0


@dataclass
class Router:
    queries: list[RouteQuery] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)

    async def route(self, query: RouteQuery) -> Placement:
        self.queries.append(query)
        return Placement("w0")

    async def publish(self, outcome: RequestOutcome) -> None:
        self.outcomes.append(outcome)


async def test_the_outcome_counts_all_choices_and_the_query_has_the_affinity() -> None:
    router = Router()
    await told(FakeDecode(each_says(WORDS), workers_=workers(1)), replace(ORDER, n=2, affinity_key="k"), router=router)
    [outcome] = router.outcomes
    assert (outcome.num_output_tokens, outcome.finish_reason, outcome.error_code) == (6 + 5, "stop", "")
    assert [query.affinity_key for query in router.queries] == ["k"]


async def test_each_choice_that_was_routed_by_itself_has_an_outcome_that_is_no_first_token() -> None:
    class Moving(Router):
        async def route(self, query: RouteQuery) -> Placement:
            self.queries.append(query)
            return Placement("w1" if query.attempt else "w0", decision_id=f"d{len(self.queries)}")

    def script(worker: str, generation: Generation) -> list[Step]:
        steps = each_says(WORDS)(worker, generation)
        return [*steps[:2], WorkerLost("lost")] if worker == "w0" else steps

    router = Moving()
    await told(FakeDecode(script, workers_=workers(2)), replace(ORDER, n=2), router=router)
    routed = {query.request_id: f"d{i + 1}" for i, query in enumerate(router.queries)}
    assert set(routed) == {"r1", "r1.0", "r1.1"}
    outcomes = {outcome.request_id: outcome for outcome in router.outcomes}
    assert {request_id: outcome.decision_id for request_id, outcome in outcomes.items()} == routed
    assert {name: (o.decode_worker_id, o.num_output_tokens, o.attempts) for name, o in outcomes.items()} == {
        "r1": ("w0", 6 + 5, 3), "r1.0": ("w1", 6, 2), "r1.1": ("w1", 5, 2)}
    assert [outcomes[name].ttft_s for name in ("r1.0", "r1.1")] == [0.0, 0.0]
    assert len(router.outcomes) == 3


@pytest.mark.parametrize("n", [1, 4])
async def test_a_begun_stream_asks_full_workers_ever_less_often_and_counts_them_as_no_move(n: int) -> None:
    router = Router()
    decode = FakeDecode(lambda worker, _g: [b"a", WorkerLost("lost")] if worker == "w0" else [Overloaded("full")],
                        workers_=workers(2))
    before = metrics.MIGRATED._value.get()
    with pytest.raises(Overloaded):
        async for _ in pipeline(decode, router=router).run(
            replace(ORDER, n=n), asyncio.get_running_loop().time() + 1.5
        ):
            pass
    assert 1 + 2 * n <= len(decode.generations) <= 1 + 6 * n
    assert metrics.MIGRATED._value.get() == before + 1
    assert router.outcomes[0].attempts == 1


@pytest.mark.parametrize("orders", [
    [ORDER], [replace(ORDER, n=2)], [ORDER, replace(ORDER, request_id="r2")]], ids=("one", "choices", "prompts"))
async def test_a_cancel_that_is_not_the_requests_own_ends_it_with_an_error(orders: list[Order]) -> None:
    class Cut(Router):
        async def route(self, query: RouteQuery) -> Placement:
            raise asyncio.CancelledError

    router = Cut()
    with pytest.raises(Unavailable):
        async with asyncio.timeout(20):
            await told(FakeDecode(), *orders, router=router)
    assert {outcome.error_code for outcome in router.outcomes} >= {Unavailable.code}


async def test_tokens_that_end_before_what_begins_each_choice_has_come_end_the_call() -> None:
    class Decode(FakeDecode):
        async def generate(self, worker_id: str, generation: Generation) -> Any:
            for choice in range(2):
                yield TokenDelta("r1", (97,), FinishReason.LENGTH, choice=choice)

    with pytest.raises(InternalError):
        async with asyncio.timeout(20):
            await told(Decode(), replace(ORDER, n=2, prompt_logprobs=0))


async def test_prompts_of_a_batch_run_at_once_and_number_their_choices_prompt_by_prompt() -> None:
    def script(_worker: str, generation: Generation) -> list[Step]:
        return [[t, 48 + generation.choice] for t in generation.prompt_token_ids]

    orders = [replace(ORDER, request_id=f"r{i}", prompt=text, n=2) for i, text in enumerate(("x", "yz", "w" * 9))]
    out, usage = await told(FakeDecode(script), *orders)
    assert [out[i].text for i in range(6)] == ["x0", "x1", "y0z0", "y1z1", "w0" * 9, "w1" * 9]
    assert usage == Usage(1 + 2 + 9, 0, 2 * (2 + 4 + 18 + 3))


async def test_an_error_of_one_prompt_ends_the_call_and_stops_the_others() -> None:
    def script(_worker: str, generation: Generation) -> list[Step]:
        return [InvalidRequest("no")] if generation.prompt_token_ids == (120,) else [b"a", asyncio.Event()]

    decode = FakeDecode(script)
    with pytest.raises(InvalidRequest):
        await told(decode, replace(ORDER, prompt="long"), replace(ORDER, request_id="r2", prompt="x"))
    assert decode.aborted == {"r1"}


async def test_an_echoed_prompt_comes_before_each_choice_with_its_logprobs() -> None:
    for prompt in ("hé", tuple("hé".encode())):
        out, usage = await told(
            FakeDecode(each_says(("a", "b"))), replace(ORDER, prompt=prompt, echo=True, logprobs=1, n=2))
        assert [out[i].text for i in range(2)] == ["héa", "héb"]
        assert usage == Usage(3, 0, 4)
        for i in range(2):
            assert out[i].prompt_ids == tuple("hé".encode())
            assert out[i].prompt_logprobs == (None, fake_logprobs(0xC3, 1), fake_logprobs(0xA9, 1))


@pytest.mark.parametrize("n", [1, 2])
async def test_no_output_asked_means_the_prompt_alone_with_its_logprobs_and_no_tokens(n: int) -> None:
    decode = FakeDecode(says("never shown"))
    out, usage = await told(decode, replace(ORDER, prompt="abc", max_tokens=0, echo=True, logprobs=0, n=n))
    assert usage == Usage(3, 0, 0)
    for choice in out.values():
        assert (choice.text, choice.ids, choice.logprobs) == ("abc", [], [])
        assert len(choice.prompt_logprobs) == 3
        assert choice.ending is not None
        assert choice.ending.finish_reason is FinishReason.LENGTH
    assert decode.generations[0].params.max_tokens == 1
    with pytest.raises(InvalidRequest) as caught:
        await told(FakeDecode(), replace(ORDER, max_tokens=0))
    assert caught.value.param == "max_tokens"


async def test_only_the_last_prompt_tokens_are_kept_and_echoed() -> None:
    decode = FakeDecode(says("!"))
    out, usage = await told(decode, replace(ORDER, prompt="x" * 600 + "tail", truncate_prompt_tokens=4, echo=True))
    assert bytes(decode.generations[0].prompt_token_ids) == b"tail"
    assert (out[0].text, usage.num_prompt_tokens) == ("tail!", 4)
    with pytest.raises(ContextLengthExceeded):
        await told(decode, replace(ORDER, prompt="x" * 600, truncate_prompt_tokens=513))


async def test_bad_words_are_forbidden_at_the_start_and_after_a_space() -> None:
    decode = FakeDecode()
    await told(decode, replace(ORDER, bad_words=("no", " no", "é"), priority=3))
    generation = decode.generations[0]
    assert set(generation.params.bad_words) == {tuple(word.encode()) for word in ("no", " no", "é", " é")}
    assert generation.priority == 3
    with pytest.raises(InvalidRequest) as caught:
        await told(decode, replace(ORDER, bad_words=("x" * 33,)))
    assert caught.value.param == "bad_words"


async def test_a_refusal_by_the_worker_names_the_clients_field() -> None:
    def script(_worker: str, _generation: Generation) -> list[Step]:
        return [InvalidRequest("grammar: too large", param="grammar")]

    with pytest.raises(InvalidRequest) as caught:
        await told(FakeDecode(script), replace(ORDER, grammar_param="response_format"))
    assert (caught.value.param, caught.value.message) == ("response_format", "response_format: too large")


async def test_pieces_wait_until_the_prompts_logprobs_are_known() -> None:
    """A worker that lets a later choice go first does not cost the others the prompt's logprobs."""
    scores = (None, fake_logprobs(105, 0))

    class Decode(FakeDecode):
        async def generate(self, worker_id: str, generation: Generation) -> Any:
            yield TokenDelta("r1", (98,), choice=1)
            for _ in range(20):  # the choice has its turn
                await asyncio.sleep(0)
            yield TokenDelta("r1", (97,), FinishReason.LENGTH, choice=0, prompt_logprobs=scores)
            yield TokenDelta("r1", (98,), FinishReason.LENGTH, choice=1)

    out, _ = await told(Decode(), replace(ORDER, n=2, prompt_logprobs=0))
    assert [(out[i].text, out[i].prompt_logprobs) for i in range(2)] == [("a", scores), ("bb", scores)]
