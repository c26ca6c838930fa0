from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.block_hash import HashScheme
from common.errors import DeadlineExceeded, InvalidRequest, ModelLoadError, ModelNotFound, Overloaded
from common.tokenized import ChatPrompt, HashSpec
from tests.unit.common.text import folders
from tokenizer_svc.encoder import LONG_TEXT_CHARS, Encoder
from tokenizer_svc.served_models import ServedModel, ServedModels

KEY = b"k" * 32
SPINS = "{% for i in range(99999) %}{% for j in spin %}{% endfor %}{% endfor %}"
USER = {"role": "user", "content": "the fox"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = folders.write_folder(tmp_path_factory.mktemp("model"))
    return ServedModels.load({"m": folder}, max_text_bytes=1000, render_timeout_s=1.0).get("m")


@pytest.fixture
def make() -> Iterator[Callable[..., Encoder]]:
    made: list[Encoder] = []

    def build(**changes: Any) -> Encoder:
        options: dict[str, Any] = {"threads": 1, "max_queued": 2, "max_text_bytes": 1000, "render_timeout_s": 1.0}
        made.append(Encoder(KEY, **{**options, **changes}))
        return made[-1]

    yield build
    for encoder in made:
        encoder.close()


async def test_text_becomes_ids_hashes_and_token_strings(model: ServedModel, make: Callable[..., Encoder]) -> None:
    spec = HashSpec("m", "r1", "float32", 4, adapter="a", cache_salt="s")
    made = await make().encode_text(model, "the quick fox 🙂", add_special_tokens=False, hash_spec=spec,
                                    token_strings=True)
    assert model.tokenizer.decode(made.token_ids, skip_special_tokens=False) == "the quick fox 🙂"
    assert len(made.token_strings) == len(made.token_ids)
    scheme = HashScheme(KEY, "m", "r1", "float32", 4)
    assert made.block_hashes == tuple(scheme.chain(scheme.root("a", "s"), made.token_ids))
    assert len(made.block_hashes) == len(made.token_ids) // 4


async def test_a_chat_is_the_rendered_template_as_tokens(model: ServedModel, make: Callable[..., Encoder]) -> None:
    made = await make().encode_chat(model, ChatPrompt([USER]))
    assert model.tokenizer.decode(made.token_ids, skip_special_tokens=False) == "<|user|>the fox</s>"
    assert made.block_hashes == ()


async def test_given_tokens_are_validated_and_hashed_as_they_are(
    model: ServedModel, make: Callable[..., Encoder]
) -> None:
    encoder = make()
    made = await encoder.check_tokens(model, [5, 6, 7], hash_spec=HashSpec("m", "", "float32", 2))
    assert (made.token_ids, len(made.block_hashes)) == ((5, 6, 7), 1)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        await encoder.check_tokens(model, [5, 10**6])
    with pytest.raises(InvalidRequest, match="block_size"):
        await encoder.check_tokens(model, [5], hash_spec=HashSpec("m", "", "float32", 0))


@pytest.mark.parametrize("text", ["x" * 1001, "日" * 400])
async def test_text_beyond_the_limit_in_bytes_is_refused_naming_it(
    model: ServedModel, make: Callable[..., Encoder], text: str
) -> None:
    with pytest.raises(InvalidRequest, match="longer than 1000 bytes"):
        await make().encode_text(model, text, add_special_tokens=False)


async def test_a_full_queue_refuses_at_once_and_frees_its_places(
    model: ServedModel, make: Callable[..., Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, gate = make(), threading.Event()
    monkeypatch.setattr(type(model.tokenizer), "check", lambda *_: gate.wait(10))
    running = [asyncio.create_task(encoder.check_tokens(model, [5])) for _ in range(2)]
    await asyncio.sleep(0)
    assert encoder.num_queued == 2
    with pytest.raises(Overloaded) as caught:
        await encoder.check_tokens(model, [5])
    assert caught.value.retry_after_s is not None
    gate.set()
    await asyncio.gather(*running)
    await encoder.drain()
    assert encoder.num_queued == 0


async def test_a_caller_that_goes_away_while_queued_gives_its_place_back(
    model: ServedModel, make: Callable[..., Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, gate = make(), threading.Event()
    monkeypatch.setattr(type(model.tokenizer), "check", lambda *_: gate.wait(10))
    running = asyncio.create_task(encoder.check_tokens(model, [5]))
    queued = asyncio.create_task(encoder.check_tokens(model, [5]))
    await asyncio.sleep(0.05)
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    await asyncio.sleep(0)
    assert encoder.num_queued == 1
    gate.set()
    await running


async def test_a_render_that_spins_in_silence_is_answered_at_its_time_limit(
    tmp_path: Path, make: Callable[..., Encoder]
) -> None:
    folder = folders.write_folder(tmp_path, template=SPINS)
    model = ServedModels.load({"m": folder}, max_text_bytes=1000, render_timeout_s=0.1).get("m")
    prompt = ChatPrompt([USER], template_kwargs={"spin": [0] * 300})
    with pytest.raises(InvalidRequest, match=r"0\.1 s") as caught:
        await make(render_timeout_s=0.1).encode_chat(model, prompt)
    assert caught.value.param == "messages"


async def test_time_in_the_queue_does_not_count_as_time_of_rendering(
    model: ServedModel, make: Callable[..., Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, gate = make(render_timeout_s=0.1), threading.Event()
    monkeypatch.setattr(type(model.tokenizer), "check", lambda *_: gate.wait(10))
    ahead = asyncio.create_task(encoder.check_tokens(model, [5]))
    await asyncio.sleep(0)
    rendering = asyncio.create_task(encoder.encode_chat(model, ChatPrompt([USER])))
    await asyncio.sleep(0.3)
    gate.set()
    assert (await rendering).token_ids
    await ahead


async def test_a_prompt_with_a_hash_spec_is_encoded_by_segments_and_any_other_as_a_whole(
    model: ServedModel, make: Callable[..., Encoder]
) -> None:
    encoder, spec, text = make(), HashSpec("m", "", "float32", 4), "</s>the fox</s>"
    with_spec = await encoder.encode_text(model, text, add_special_tokens=True, hash_spec=spec)
    without = await encoder.encode_text(model, text, add_special_tokens=True)
    assert with_spec.token_ids == without.token_ids
    assert with_spec.turn
    assert not without.turn


async def test_long_texts_never_stall_short_ones(
    model: ServedModel, make: Callable[..., Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, gate, encode = make(max_queued=20, max_text_bytes=1 << 20), threading.Event(), type(model.tokenizer).encode

    def held(tokenizer: Any, text: str, **options: Any) -> list[int]:
        assert len(text) <= LONG_TEXT_CHARS or gate.wait(10)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(type(model.tokenizer), "encode", held)
    long = [asyncio.create_task(encoder.encode_text(model, "x" * (LONG_TEXT_CHARS + 1), add_special_tokens=False))
            for _ in range(8)]
    await asyncio.sleep(0)
    assert (await encoder.encode_text(model, "the fox", add_special_tokens=False)).token_ids
    assert not any(task.done() for task in long)
    gate.set()
    assert len({made.token_ids for made in await asyncio.gather(*long)}) == 1


async def test_a_call_that_waits_beyond_its_deadline_is_answered_and_leaves_the_queue(
    model: ServedModel, make: Callable[..., Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, gate = make(call_timeout_s=0.2), threading.Event()
    monkeypatch.setattr(type(model.tokenizer), "check", lambda *_: gate.wait(10))
    calls = [asyncio.create_task(encoder.check_tokens(model, [5])) for _ in range(2)]
    for call in calls:
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
            await call
    async with asyncio.timeout(5):
        while encoder.num_queued > 1:  # the one that a thread has taken up stays
            await asyncio.sleep(0)
    gate.set()
    await encoder.drain()


def test_an_unknown_model_and_a_broken_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="'x'"):
        ServedModels({}).get("x")
    with pytest.raises(ModelLoadError, match=r"model m: .*tokenizer\.json") as caught:
        ServedModels.load({"m": tmp_path}, max_text_bytes=1, render_timeout_s=1)
    assert caught.value.param == "models"
