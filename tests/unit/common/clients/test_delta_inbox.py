from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from common.clients.delta_inbox import MAX_UNREAD_LOGPROBS, DeltaInbox, joined
from common.errors import ReaderTooSlow, ShoalError, WorkerLost
from common.generation import FinishReason, TokenDelta, TokenLogprobs


def delta(choice: int, *token_ids: int, finish: FinishReason | None = None) -> TokenDelta:
    logprobs = tuple(TokenLogprobs(-float(token_id), (), ()) for token_id in token_ids)
    return TokenDelta("r", token_ids, finish, choice=choice, logprobs=logprobs)


@st.composite
def runs(draw: st.DrawFn) -> list[TokenDelta]:
    """Deltas of up to three choices, interleaved; each may end, and nothing of it comes after that."""
    open_, made = {0, 1, 2}, []
    for choice in draw(st.lists(st.integers(0, 2), max_size=20)):
        if choice in open_:
            finish = draw(st.sampled_from((None, None, None, FinishReason.STOP, FinishReason.LENGTH)))
            made.append(delta(choice, *draw(st.lists(st.integers(0, 99), max_size=3)), finish=finish))
            open_ -= {choice} if finish else set()
    return made


def of_choice(items: list[TokenDelta | ShoalError], choice: int) -> tuple[list[int], list[float], FinishReason | None]:
    mine = [item for item in items if isinstance(item, TokenDelta) and item.choice == choice]
    return ([token for item in mine for token in item.token_ids],
            [entry.logprob for item in mine for entry in item.logprobs],
            mine[-1].finish_reason if mine else None)


@given(runs())
def test_joining_keeps_each_choice_its_tokens_logprobs_and_finish(items: list[TokenDelta]) -> None:
    made = joined(items)
    assert len(made) == len({item.choice for item in items})
    for choice in range(3):
        assert of_choice(made, choice) == of_choice(list(items), choice)


def test_a_failure_stays_alone_and_behind_what_came_before_it() -> None:
    lost = WorkerLost("gone")
    aborted = delta(0, finish=FinishReason.ABORT)
    made = joined([delta(0, 1), delta(1, 7), delta(0, 2), aborted, lost])
    assert [getattr(item, "token_ids", None) for item in made] == [(1, 2), (7,), (), None]
    assert made[2:] == [aborted, lost]


def test_the_logprobs_of_the_prompt_come_once_with_the_joined_delta() -> None:
    first = TokenDelta("r", (1,), prompt_logprobs=(None, TokenLogprobs(-1.0, (), ())))
    (made,) = joined([first, delta(0, 2)])
    assert isinstance(made, TokenDelta)
    assert made.prompt_logprobs == first.prompt_logprobs


async def test_a_reader_that_keeps_up_gets_each_delta_by_itself_and_one_that_falls_behind_gets_them_joined() -> None:
    inbox = DeltaInbox()
    first = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put(delta(0, 1))
    assert await first == [delta(0, 1)]
    inbox.put(delta(0, 2))
    inbox.put(delta(0, 3))
    assert await inbox.take() == [delta(0, 2, 3)]


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    inbox = DeltaInbox()
    reader = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put(delta(0, 1))
    reader.cancel()
    await asyncio.wait({reader})
    assert reader.cancelled()
    assert await inbox.take() == [delta(0, 1)]


async def test_of_more_logprobs_than_may_wait_only_the_error_is_left_and_a_reader_that_reads_never_meets_it() -> None:
    entry = TokenLogprobs(-1.0, tuple(range(20)), (-1.0,) * 20)
    large = TokenDelta("r", (1,) * 1000, logprobs=(entry,) * 1000)
    num_that_fit = MAX_UNREAD_LOGPROBS // 21_000
    inbox = DeltaInbox()
    for _ in range(3):
        assert {inbox.put(large) for _ in range(num_that_fit)} == {True}
        (made,) = await inbox.take()
        assert isinstance(made, TokenDelta)
        assert len(made.logprobs) == 1000 * num_that_fit
    fits = [inbox.put(large) for _ in range(num_that_fit + 1)]
    assert fits == [True] * num_that_fit + [False]
    (error,) = await inbox.take()
    assert isinstance(error, ReaderTooSlow)


async def test_tokens_without_logprobs_wait_for_their_reader_however_many_they_are() -> None:
    inbox = DeltaInbox()
    assert {inbox.put(TokenDelta("r", (1,) * 1000)) for _ in range(400)} == {True}
    (made,) = await inbox.take()
    assert isinstance(made, TokenDelta)
    assert len(made.token_ids) == 400_000
