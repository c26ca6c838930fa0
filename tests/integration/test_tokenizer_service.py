"""The tokenizer service over real gRPC: in this process with an in-memory registry, and as a process that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from common.block_hash import HashScheme
from common.clients.tokenizer import TokenizerClient
from common.errors import (
    Cancelled,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ShoalError,
    Unavailable,
    UnsupportedValue,
)
from common.service_record import ServiceRecord
from common.tokenized import ChatPrompt, HashSpec
from proto import tokenizer_pb2
from tests.integration.tokenizer_fleet import TEXT, Fleet, one_by_one
from tests.unit.common.text import folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder)
    await fleet.directory.start()
    yield fleet
    await fleet.client.stop()
    await fleet.directory.stop()
    for service in fleet.services:
        await service.stop()


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_text_goes_to_tokens_with_hashes_and_comes_back(fleet: Fleet) -> None:
    await fleet.start_replica()
    spec = HashSpec("m", "r", "float32", 8, cache_salt="tenant")
    made = await fleet.client.tokenize_text("m", TEXT, add_special_tokens=False, hash_spec=spec, token_strings=True)
    assert await fleet.client.decode("m", made.token_ids) == TEXT
    scheme = HashScheme(await fleet.registry.deployment_key(), "m", "r", "float32", 8)
    assert made.block_hashes == tuple(scheme.chain(scheme.root("", "tenant"), made.token_ids))
    assert len(made.token_strings) == len(made.token_ids)
    assert await fleet.client.check_tokens("m", made.token_ids, hash_spec=spec) == type(made)(
        made.token_ids, made.block_hashes)
    assert (await fleet.client.tokenize_text("m", "")).token_ids == ()


async def test_single_tokens_have_their_bytes_and_are_special_or_not(fleet: Fleet) -> None:
    await fleet.start_replica()
    ids = (await fleet.client.tokenize_text("m", "é🙂", add_special_tokens=False)).token_ids
    texts = await fleet.client.token_texts("m", [*ids, 1])
    assert b"".join(text.raw for text in texts[:-1]) == "é🙂".encode()
    assert [text.is_special for text in texts] == [False] * len(ids) + [True]
    assert texts[-1].raw == b"</s>"
    assert await fleet.client.token_texts("m", []) == []


async def test_a_chat_and_the_description_come_from_the_models_own_template(fleet: Fleet) -> None:
    await fleet.start_replica()
    made = await fleet.client.tokenize_chat("m", ChatPrompt([{"role": "user", "content": "the fox"}]))
    assert await fleet.client.decode("m", made.token_ids) == "<|user|>the fox</s>"
    assert await fleet.client.decode("m", made.token_ids, skip_special_tokens=True) == "<|user|>the fox"
    described = await fleet.client.describe("m")
    assert (described.eos_token_ids, described.bos_token_id, described.chat_template) == ((1,), 0, folders.TEMPLATE)


@pytest.mark.parametrize(("call", "error", "said"), [
    (lambda c: c.tokenize_text("m", "\ud800"), InvalidRequest, "surrogate"),
    (lambda c: c.tokenize_chat("m", ChatPrompt([{"role": "u", "content": "\ud800"}])), InvalidRequest, "messages"),
    (lambda c: c.tokenize_chat("m", ChatPrompt([])), InvalidRequest, "at least one"),
    (lambda c: c.tokenize_chat("m", ChatPrompt([{"role": "u"}], template_kwargs={"chat_template": "x"})),
     InvalidRequest, "chat_template"),
    (lambda c: c.tokenize_chat("bare", ChatPrompt([{"role": "u"}])), UnsupportedValue, "no chat template"),
    (lambda c: c.check_tokens("m", [1, 10**9]), InvalidRequest, "outside the vocabulary"),
    (lambda c: c.check_tokens("m", [-1]), InvalidRequest, "outside the vocabulary"),
    (lambda c: c.decode("m", [2**40]), InvalidRequest, "outside the vocabulary"),
    (lambda c: c.token_texts("m", [10**9]), InvalidRequest, "outside the vocabulary"),
    (lambda c: c.tokenize_text("other", "x"), ModelNotFound, "'other'"),
    (lambda c: c.open_text("other").push([5]), ModelNotFound, "'other'"),
    (lambda c: c.open_text("m", stop=[""]).push([5]), InvalidRequest, "stop"),
])
async def test_a_refusal_reaches_the_caller_with_its_facts(
    fleet: Fleet, tmp_path: Path, call: Callable[[TokenizerClient], Any], error: type[ShoalError], said: str
) -> None:
    bare = folders.write_folder(tmp_path / "bare", template="")
    await fleet.start_replica(f"m={fleet.folder},bare={bare}")
    with pytest.raises(error, match=said) as caught:
        await call(fleet.client)
    assert caught.value.param


async def test_json_that_is_not_a_conversation_is_refused_by_the_service_itself(fleet: Fleet) -> None:
    await fleet.start_replica()
    for raw in (b"{", b"{}", b"[1]", b"[" * 100_000):
        request = tokenizer_pb2.TokenizeRequest(model="m", chat=tokenizer_pb2.ChatInput(messages_json=raw))
        with pytest.raises(InvalidRequest, match="messages"):
            await fleet.client._tokenize(request)
    with pytest.raises(InvalidRequest, match="input"):
        await fleet.client._tokenize(tokenizer_pb2.TokenizeRequest(model="m"))


async def test_each_model_gets_a_replica_that_has_it(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.start_replica()
    await fleet.start_replica(f"w={folders.write_folder(tmp_path, folders.word_piece)}")
    for _ in range(4):
        assert await fleet.client.decode("w", [2, 3]) == "playing"
        assert await fleet.client.decode("m", await fleet.ids()) == TEXT


async def test_calls_spread_over_the_replicas(fleet: Fleet) -> None:
    for _ in range(2):
        await fleet.start_replica()
    streams = [fleet.client.open_text("m") for _ in range(8)]
    for stream in streams:
        await stream.push([70])
    assert [fleet.num_streams(s) for s in fleet.services] == [4, 4]
    for stream in streams:
        stream.close()
    await until(lambda: not any(map(fleet.num_streams, fleet.services)))


async def test_a_call_made_while_no_replica_lives_waits_for_one(fleet: Fleet) -> None:
    waiting = asyncio.create_task(fleet.client.tokenize_text("m", TEXT))
    await asyncio.sleep(0.2)
    await fleet.start_replica()
    assert (await waiting).token_ids


async def test_without_any_replica_calls_and_texts_end_as_unavailable_at_their_deadline(fleet: Fleet) -> None:
    client = TokenizerClient(fleet.directory, call_timeout_s=0.3, text_timeout_s=0.3)
    with pytest.raises(Unavailable):
        await client.tokenize_text("m", "x")
    with pytest.raises(Unavailable):
        await client.open_text("m").push([5])
    await client.stop()


async def test_calls_survive_a_replica_that_is_killed_and_comes_back_elsewhere(fleet: Fleet) -> None:
    first = await fleet.start_replica()
    ids = await fleet.ids()
    await fleet.kill(first)
    waiting = [asyncio.create_task(fleet.ids()) for _ in range(5)]
    await asyncio.sleep(0.5)
    await fleet.start_replica()
    assert await asyncio.gather(*waiting) == [ids] * 5


@pytest.mark.parametrize("kill_at", [0, 1, 7, 20, -1])
async def test_a_text_goes_on_unchanged_when_its_replica_is_killed_and_replaced(fleet: Fleet, kill_at: int) -> None:
    first = await fleet.start_replica()
    ids = await fleet.ids()
    stream = fleet.client.open_text("m")
    before = await one_by_one(stream, ids[:kill_at])
    await fleet.kill(first)
    replacing = asyncio.create_task(fleet.start_replica())
    after = await one_by_one(stream, ids[kill_at:])
    last = await stream.finish()
    await replacing
    assert before + after + last.text == TEXT
    assert (last.num_tokens, last.finished) == (len(ids), True)
    assert fleet.num_streams(fleet.services[1]) == 0


async def test_many_texts_with_stops_survive_a_kill_beside_a_living_replica(fleet: Fleet) -> None:
    first = await fleet.start_replica()
    await fleet.start_replica()
    ids = await fleet.ids()
    half = asyncio.Event()

    async def run(stop: tuple[str, ...]) -> tuple[str, int, str | None]:
        stream = fleet.client.open_text("m", stop=stop)
        text, delta = "", None
        for index, token_id in enumerate(ids):
            if index == 30:
                await half.wait()
            delta = await stream.push([token_id])
            text += delta.text
            if delta.finished:
                return text, delta.num_tokens, delta.matched_stop
        delta = await stream.finish()
        return text + delta.text, delta.num_tokens, delta.matched_stop

    runs = [asyncio.create_task(run(() if n % 2 else ("é the quick",))) for n in range(12)]
    await asyncio.sleep(0.3)
    await fleet.kill(first)
    half.set()
    results = await asyncio.gather(*runs)
    stopped, num_tokens, matched = results[0]
    assert stopped == TEXT[: TEXT.index("é the quick")]
    assert matched == "é the quick"
    assert await fleet.client.decode("m", ids[:num_tokens]) == stopped + matched
    assert set(results[0::2]) == {results[0]}
    assert set(results[1::2]) == {(TEXT, len(ids), None)}


@pytest.mark.parametrize("stop", [(), ("é the quick",), ("never there",)])
@pytest.mark.parametrize("num_last", [0, 1, 9, None])
async def test_a_text_is_the_same_whether_its_last_tokens_come_with_the_end_or_before_it(
    fleet: Fleet, stop: tuple[str, ...], num_last: int | None
) -> None:
    await fleet.start_replica()
    ids = await fleet.ids()
    ids = ids[:-1]  # an output may end anywhere
    cut = 0 if num_last is None else len(ids) - num_last
    apart, together = (fleet.client.open_text("m", stop=stop) for _ in range(2))
    texts = ["", ""]
    for index, (stream, last) in enumerate(((apart, ()), (together, ids[cut:]))):
        pushed = ids if stream is apart else ids[:cut]
        delta = await stream.push(pushed) if pushed else None
        texts[index] = delta.text if delta is not None else ""
        if delta is None or not delta.finished:
            delta = await stream.finish(last)
            texts[index] += delta.text
        texts[index] += f" {delta.num_tokens} {delta.matched_stop} {delta.finished}"
    assert texts[0] == texts[1]
    assert fleet.num_streams(fleet.services[0]) == 0


async def test_a_replica_that_stalls_is_left_and_the_text_goes_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start_replica()
    ids = await fleet.ids()
    stream = fleet.client.open_text("m")
    text = await one_by_one(stream, ids[:10])
    [replica] = fleet.client._replicas._replicas.values()
    link = replica.link()
    monkeypatch.setattr("tokenizer_svc.detokenizer.Session.step", lambda *_: [])
    pushing = asyncio.create_task(stream.push(ids[10:11]))
    await asyncio.sleep(0.2)
    monkeypatch.undo()
    text += (await pushing).text + await one_by_one(stream, ids[11:])
    assert link.broken  # for all texts alike, so that each does not wait for itself
    assert text + (await stream.finish()).text == TEXT


async def test_a_push_that_is_cancelled_loses_no_text(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.start_replica()
    ids = await fleet.ids()
    stream = fleet.client.open_text("m")
    text = await one_by_one(stream, ids[:10])
    monkeypatch.setattr("tokenizer_svc.detokenizer.Session.step", lambda *_: [])
    pushing = asyncio.create_task(stream.push(ids[10:20]))
    await asyncio.sleep(0.1)
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    monkeypatch.undo()
    text += await one_by_one(stream, ids[20:]) + (await stream.finish()).text
    assert text == TEXT


async def test_a_full_replica_refuses_and_another_takes_over(fleet: Fleet) -> None:
    await fleet.start_replica(max_text_streams=1)
    client = TokenizerClient(fleet.directory, text_timeout_s=0.5)
    first, second = client.open_text("m"), client.open_text("m")
    await first.push([70])
    with pytest.raises((Overloaded, Unavailable)):
        await second.push([70])
    await fleet.start_replica()
    assert (await second.push([71])).num_tokens == 2
    await client.stop()


@pytest.mark.parametrize("state", ["fresh", "pushed", "finished", "pushing", "twice"])
async def test_close_leaves_nothing_behind_in_any_state(
    fleet: Fleet, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await fleet.start_replica()
    stream = fleet.client.open_text("m")
    if state != "fresh":
        await stream.push([70])
    if state == "finished":
        await stream.finish()
    if state == "pushing":
        pushing = asyncio.create_task(stream.push([71]))
        await asyncio.sleep(0)
        stream.close()
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
    stream.close()
    if state == "twice":
        stream.close()
    await until(lambda: fleet.num_streams(service) == 0)
    for replica in fleet.client._replicas._replicas.values():
        assert not replica.link()._asks
    with pytest.raises(Cancelled):
        await stream.push([70])


async def test_drain_waits_for_open_texts_and_takes_new_ones_elsewhere(fleet: Fleet) -> None:
    first = await fleet.start_replica()
    stream = fleet.client.open_text("m")
    await stream.push([70])
    second = await fleet.start_replica()
    draining = asyncio.create_task(first.drain())
    await until(lambda: len(fleet.directory.records("tokenizer")) == 1)
    other = fleet.client.open_text("m")
    await other.push([70])
    assert fleet.num_streams(second) == 1
    assert not draining.done()
    await stream.finish()
    await asyncio.wait_for(draining, 5)
    await other.finish()


async def test_channels_of_replicas_that_are_gone_are_closed(fleet: Fleet) -> None:
    first = await fleet.start_replica()
    await fleet.ids()
    await first.stop()
    fleet.services.clear()
    await fleet.start_replica()
    await until(lambda: len(fleet.directory.all("tokenizer")) == 1)
    await fleet.ids()
    assert len(fleet.client._replicas._replicas) == 1


async def test_a_record_without_a_server_behind_it_costs_only_a_retry(fleet: Fleet) -> None:
    await fleet.registry.register(
        ServiceRecord("tokenizer", "aaa", "1", "127.0.0.1:1", models=("m",)), ttl_s=5)
    await fleet.start_replica()
    for _ in range(4):
        assert await fleet.ids()
        stream = fleet.client.open_text("m")
        await stream.push([70])
        await stream.finish()


async def test_a_dead_replica_that_is_the_only_one_is_not_tried_in_a_tight_loop(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.registry.register(ServiceRecord("tokenizer", "aaa", "1", "127.0.0.1:1", models=("m",)), ttl_s=5)
    await fleet.directory.refresh()
    client = TokenizerClient(fleet.directory, call_timeout_s=0.6, text_timeout_s=0.6)
    tries: list[str] = []
    mark = client._replicas.mark_failed
    monkeypatch.setattr(client._replicas, "mark_failed", lambda replica: (tries.append(replica.address), mark(replica)))
    with pytest.raises(Unavailable):
        await client.tokenize_text("m", "x")
    with pytest.raises(Unavailable):
        await client.open_text("m").push([5])
    assert 2 <= len(tries) <= 14
    await client.stop()


async def test_stop_answers_what_still_waits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.start_replica()
    client = TokenizerClient(fleet.directory)
    stream = client.open_text("m")
    await stream.push([70])
    monkeypatch.setattr("tokenizer_svc.detokenizer.Session.step", lambda *_: [])
    pushing = asyncio.create_task(stream.push([71]))
    await asyncio.sleep(0.1)
    await client.stop()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(pushing, 2)
