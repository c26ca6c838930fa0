"""Generated turns keep their exact ids: through the tokenizer service alone, and as prefix hits of a whole stack."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from common.tokenized import ChatPrompt, HashSpec, Tokenized
from tests.integration.tokenizer_fleet import Fleet
from tests.stack import RunningStack
from tests.unit.common.text import folders

CHATML = ("{% for m in messages %}{{ bos_token }}{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
          "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}")
Messages = list[dict[str, str]]
USER = {"role": "user", "content": "the quick fox"}
GO_ON = {"role": "user", "content": "go on"}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(folders.write_folder(tmp_path, template=CHATML))
    await fleet.directory.start()
    yield fleet
    await fleet.client.stop()
    await fleet.directory.stop()
    for service in fleet.services:
        await service.stop()


async def tokenize(fleet: Fleet, messages: Messages, salt: str = "") -> Tokenized:
    spec = HashSpec("m", "r", "float32", 8, cache_salt=salt)
    return await fleet.client.tokenize_chat("m", ChatPrompt(messages), hash_spec=spec)


async def drawn_ids(fleet: Fleet, text: str) -> tuple[int, ...]:
    """Ids of the text that no encoder gives: a token for each character."""
    ids = tuple([i for char in text for i in await fleet.ids(char)])
    assert ids != await fleet.ids(text)
    return ids


async def answered(fleet: Fleet, prompt: Tokenized, drawn: tuple[int, ...], **opening: Any) -> dict[str, str]:
    """The message that the client gets of a generation that draws these ids, one by one."""
    stream = fleet.client.open_text("m", turn=prompt.turn, **opening)
    deltas = [await stream.push([i]) for i in drawn]
    deltas.append(await stream.finish())
    return {"role": "assistant", "content": "".join(delta.text for delta in deltas)}


async def test_a_chat_that_comes_back_has_its_turns_as_they_were_drawn(fleet: Fleet) -> None:
    await fleet.start_replica()
    messages, wanted = [USER], tuple[int, ...]()
    for said in ("the lazy dog", "jumps over 日本"):
        prompt = await tokenize(fleet, messages)
        assert prompt.token_ids[: len(wanted)] == wanted
        drawn = await drawn_ids(fleet, said)
        messages += [await answered(fleet, prompt, drawn), GO_ON]
        wanted = (*prompt.token_ids, *drawn)
    again = await tokenize(fleet, messages)
    assert again.token_ids[: len(wanted)] == wanted
    assert again.block_hashes[: len(prompt.block_hashes)] == prompt.block_hashes
    assert await fleet.client.decode("m", again.token_ids) == (
        "<s>user\nthe quick fox</s>\n<s>assistant\nthe lazy dog</s>\n<s>user\ngo on</s>\n"
        "<s>assistant\njumps over 日本</s>\n<s>user\ngo on</s>\n<s>assistant\n")


async def test_another_tenants_chat_and_a_bare_tokenize_never_see_them(fleet: Fleet) -> None:
    await fleet.start_replica()
    prompt = await tokenize(fleet, [USER], salt="a")
    drawn = await drawn_ids(fleet, "the lazy dog")
    messages = [USER, await answered(fleet, prompt, drawn), GO_ON]
    plain = (await fleet.client.tokenize_chat("m", ChatPrompt(messages))).token_ids
    assert (await tokenize(fleet, messages, salt="b")).token_ids == plain
    assert (await tokenize(fleet, messages, salt="a")).token_ids != plain


async def test_a_text_that_moved_to_another_replica_is_remembered_there(fleet: Fleet) -> None:
    first = await fleet.start_replica()
    prompt = await tokenize(fleet, [USER])
    drawn = await drawn_ids(fleet, "the lazy dog")
    stream = fleet.client.open_text("m", turn=prompt.turn)
    text = (await stream.push(drawn[:4])).text
    await fleet.start_replica()
    await fleet.kill(first)
    text += (await stream.push(drawn[4:])).text + (await stream.finish()).text
    again = await tokenize(fleet, [USER, {"role": "assistant", "content": text}, GO_ON])
    assert again.token_ids[: len(prompt.token_ids) + len(drawn)] == (*prompt.token_ids, *drawn)


async def test_a_replica_that_did_not_see_the_answer_encodes_its_text(fleet: Fleet) -> None:
    first = await fleet.start_replica()
    prompt = await tokenize(fleet, [USER])
    messages = [USER, await answered(fleet, prompt, await drawn_ids(fleet, "the lazy dog")), GO_ON]
    await fleet.start_replica()
    await fleet.kill(first)
    plain = await fleet.client.tokenize_chat("m", ChatPrompt(messages))
    assert (await tokenize(fleet, messages)).token_ids == plain.token_ids


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(tmp_path_factory.mktemp("turns"), model=str(smollm2), runner="mock-hash", mixed=1, router=0,
                      kvstore=0, block_size=16) as running:
        yield running


def chat(stack: RunningStack, messages: Messages, **changes: Any) -> dict[str, Any]:
    body = {"model": stack.model, "messages": messages, "max_tokens": 40, "return_token_ids": True, **changes}
    answer = httpx2.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def asked(stack: RunningStack, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx2.post(f"{stack.url}/{path}", json={"model": stack.model, **body}, timeout=60)
    said: dict[str, Any] = answer.json()
    return said


def test_a_chat_hits_the_cache_through_the_last_turn_that_was_generated(stack: RunningStack) -> None:
    """Mode `hash` draws ids at random: encoding their text again gives others."""
    messages: Messages = [USER]
    known = 0
    for _ in range(4):
        said = chat(stack, messages)
        usage, choice = said["usage"], said["choices"][0]
        assert usage["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16
        known = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # nothing was computed from the last one
        messages += [{"role": "assistant", "content": choice["message"]["content"]}, GO_ON]
    exact = chat(stack, messages)["choices"][0]["prompt_token_ids"]
    plain = asked(stack, "tokenize", messages=messages)["tokens"]
    assert exact != plain
    assert asked(stack, "detokenize", tokens=exact) == asked(stack, "detokenize", tokens=plain)  # the same text


def test_the_same_messages_under_another_salt_hit_nothing(stack: RunningStack) -> None:
    said = chat(stack, [USER], cache_salt="a")
    messages = [USER, {"role": "assistant", "content": said["choices"][0]["message"]["content"]}, GO_ON]
    other = chat(stack, messages, cache_salt="b")["usage"]
    same = chat(stack, messages, cache_salt="a")["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0
    assert same["prompt_tokens_details"]["cached_tokens"] > said["usage"]["prompt_tokens"]
