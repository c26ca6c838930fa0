from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from common.text.chat_template import ChatTemplate
from common.text.model_tokenizer import ModelTokenizer
from common.tokenized import ChatPrompt
from tests.unit.common.text import folders
from tokenizer_svc.segment_cache import MAX_TURNS_PER_TEXT, SegmentCache
from tokenizer_svc.turn import Turn

CHATML = ("{% for m in messages %}{{ bos_token }}{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
          "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}")
Chat = list[str]  # contents; user and assistant by turns


class Model:
    """A tokenizer with its template, and fresh caches for it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = ModelTokenizer.load(folder)
        self.template = ChatTemplate.load(folder, self.tokenizer.special_tokens)

    def cache(self, max_bytes: int = 1 << 20, name: str = "m") -> SegmentCache:
        wanted = {self.tokenizer.special_tokens[role] for role in ("bos_token", "eos_token")}
        return SegmentCache(name, self.tokenizer, self.tokenizer.segmenter(wanted), max_bytes)

    def prompt(self, chat: Chat) -> str:
        roles = ("user", "assistant")
        return self.template.render(ChatPrompt([{"role": roles[n % 2], "content": c} for n, c in enumerate(chat)]))

    def plain(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(folders.write_folder(tmp_path_factory.mktemp("tiny"), template=CHATML))


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Model:
    return Model(smollm2)


@pytest.fixture(scope="module", params=["tiny", "real"])
def model(request: pytest.FixtureRequest) -> Model:
    made: Model = request.getfixturevalue(request.param)
    return made


def letters(model: Model, text: str) -> list[int]:
    """Ids of the text that no encoder gives: a token for each character."""
    return [i for char in text for i in model.plain(char)]


def answer(model: Model, cache: SegmentCache, chat: Chat, drawn: Sequence[int], salt: str = "") -> str:
    """Generate a turn: the text that the client gets."""
    encoded = cache.encode(model.prompt(chat), salt)
    text = model.tokenizer.decode(drawn, skip_special_tokens=True)
    cache.remember(Turn.from_wire(encoded.turn), drawn, len(text))
    return text


@settings(max_examples=120, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=30), st.sampled_from(
    ["the fox", "<|im_end|>", "<s>", "</s> x", "assistant\n", " ", "\ufffd"])), min_size=1, max_size=8))
def test_a_growing_chat_has_the_ids_of_its_whole_text_at_each_turn(model: Model, chat: Chat) -> None:
    cache = model.cache()
    for num_messages in range(1, len(chat) + 1):
        text = model.prompt(chat[:num_messages])
        assert cache.encode(text, "").token_ids == model.plain(text)


def test_only_what_is_new_is_encoded(real: Model) -> None:
    def tokens(source: str) -> float:
        return REGISTRY.get_sample_value(
            "shoal_tokenizer_segment_tokens_total", {"model": "counted", "source": source}) or 0

    cache, chat = real.cache(name="counted"), ["the quick fox", "jumps", "over"]
    first = cache.encode(real.prompt(chat), "").token_ids
    assert 0 < tokens("encoded") <= len(first)
    assert tokens("encoded") + tokens("cached") == len(first)
    before = tokens("encoded")
    cache.encode(real.prompt([*chat, "the lazy dog", "again"]), "")
    assert tokens("encoded") - before == len(
        [*real.plain("<|im_start|>assistant\nthe lazy dog"), *real.plain("<|im_start|>user\nagain")])


def test_a_generated_turn_keeps_the_ids_that_were_drawn(model: Model) -> None:
    cache, chat = model.cache(), ["the fox"]
    prompts = [cache.encode(model.prompt(chat), "").token_ids]
    for said in ("the lazy dog", "quick brown"):
        drawn = letters(model, said)
        assert tuple(drawn) != model.plain(said)
        chat += [answer(model, cache, chat, drawn), "go on"]
        prompts.append(cache.encode(model.prompt(chat), "").token_ids)
        assert prompts[-1][: len(prompts[-2]) + len(drawn)] == (*prompts[-2], *drawn)
        assert model.text(prompts[-1]) == model.prompt(chat)


def test_another_salt_another_chat_and_another_text_get_the_plain_ids(model: Model) -> None:
    cache, drawn = model.cache(), letters(model, "the lazy dog")
    said = answer(model, cache, ["the fox"], drawn, salt="a")
    for salt, chat in (("b", ["the fox", said, "x"]), ("a", ["a fox", said, "x"]), ("a", ["the fox", said + ".", "x"]),
                       ("a", ["the fox", "y", "z", said, "x"])):
        text = model.prompt(chat)
        assert cache.encode(text, salt).token_ids == model.plain(text)
    assert tuple(drawn) == cache.encode(model.prompt(["the fox", said, "x"]), "a").token_ids[
        len(model.plain(model.prompt(["the fox"]))) :][: len(drawn)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.tuples(st.text(max_size=10), st.integers(1, 24)), min_size=1, max_size=5))
def test_random_ids_are_kept_exactly_and_the_models_text_never_changes(
    model: Model, seed: int, turns: list[tuple[str, int]]
) -> None:
    assume(all(model.text(model.plain(said)) == said for said, _ in turns))  # the real vocabulary lacks a few bytes
    cache, chat, draw = model.cache(), list[str](), random.Random(seed)
    for said, num_drawn in turns:
        chat.append(said)
        prompt = cache.encode(model.prompt(chat), "")
        drawn = [draw.randrange(model.tokenizer.vocab_size) for _ in range(num_drawn)]
        text = answer(model, cache, chat, drawn)
        chat.append(text)
        again = model.prompt(chat)
        ids = cache.encode(again, "").token_ids
        assert model.text(ids) == again
        is_plain_text = not any(token in text for token in ("<s>", "</s>", "<|im_"))
        if is_plain_text and model.tokenizer.special_ids.isdisjoint(drawn):
            assert ids[: len(prompt.token_ids) + num_drawn] == (*prompt.token_ids, *drawn)


def test_an_end_token_that_was_shown_is_no_part_of_the_turn(model: Model) -> None:
    cache, drawn = model.cache(), letters(model, "dog")
    end = model.tokenizer.eos_token_ids[0]
    prompt = cache.encode(model.prompt(["the fox"]), "")
    cache.remember(Turn.from_wire(prompt.turn), [*drawn, end], 99)
    again = cache.encode(model.prompt(["the fox", "dog", "x"]), "").token_ids
    assert again[len(prompt.token_ids) :][: len(drawn) + 1] == (*drawn, end)


def test_a_turn_with_the_end_of_a_turn_inside_is_not_remembered(model: Model) -> None:
    cache, said = model.cache(), letters(model, "dog")
    cache.encode(model.prompt(["the fox"]), "")
    before = cache.num_bytes
    answer(model, cache, ["the fox"], [*said, model.tokenizer.eos_token_ids[0], *said])
    assert cache.num_bytes == before
    text = model.prompt(["the fox", "dogdog", "x"])
    assert cache.encode(text, "").token_ids == model.plain(text)


def test_a_turn_that_spells_the_end_of_a_turn_is_not_remembered(model: Model) -> None:
    cache, end = model.cache(), model.tokenizer.special_tokens["eos_token"]
    cache.encode(model.prompt(["the fox"]), "")
    before = cache.num_bytes
    said = answer(model, cache, ["the fox"], letters(model, "dog") + [i for c in end for i in model.plain(c)])
    assert said == "dog" + end
    assert cache.num_bytes == before
    text = model.prompt(["the fox", said, "x"])
    assert cache.encode(text, "").token_ids == model.plain(text)


def test_a_special_token_inside_counts_only_where_the_text_shows_it(real: Model) -> None:
    cache, said = real.cache(), letters(real, "dog")
    drawn = [*said, *real.plain("<repo_name>"), *said]
    prompt = cache.encode(real.prompt(["the fox"]), "")
    cache.remember(Turn.from_wire(prompt.turn), drawn, 99)
    shown, hidden = real.prompt(["the fox", "dog<repo_name>dog", "x"]), real.prompt(["the fox", "dogdog", "x"])
    assert cache.encode(shown, "").token_ids[len(prompt.token_ids) :][: len(drawn)] == tuple(drawn)
    assert cache.encode(hidden, "").token_ids == real.plain(hidden)


@pytest.mark.parametrize(("drawn", "shown", "kept"), [
    (["d", "o", "g", " ", "e"], "dog", ["d", "o", "g"]),  # the stop string began with a token
    (["d", "o", " the"], "do ", None),  # and within one
    (["d", "o"], "", None),
])
def test_a_stop_string_leaves_the_tokens_before_it_or_nothing(
    model: Model, drawn: list[str], shown: str, kept: list[str] | None
) -> None:
    cache = model.cache()
    ids = [i for piece in drawn for i in model.plain(piece)]
    prompt = cache.encode(model.prompt(["the fox"]), "")
    before = cache.num_bytes
    cache.remember(Turn.from_wire(prompt.turn), ids, len(shown))
    assert (cache.num_bytes == before) == (kept is None)
    text = model.prompt(["the fox", shown, "x"])
    again = cache.encode(text, "").token_ids
    if kept is None:
        assert again == model.plain(text)
    else:
        wanted = [i for piece in kept for i in model.plain(piece)]
        assert again[len(prompt.token_ids) :][: len(wanted)] == tuple(wanted)
        assert model.text(again) == text


def test_a_prompt_that_ends_in_a_long_text_or_has_no_special_token_has_no_turn(model: Model) -> None:
    cache = model.cache()
    assert cache.encode("the fox", "").turn == b""
    assert cache.encode(model.prompt(["a"]) + "b c d e f g " * 40, "").turn == b""
    assert cache.encode(model.prompt(["a"]) + "b c", "").turn != b""


def test_a_tokenizer_that_does_not_give_a_prompts_text_back_has_no_turns(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(folders.write_folder(tmp_path, folders.word_piece))
    cache = SegmentCache("m", tokenizer, tokenizer.segmenter(["[SEP]"]))
    encoded = cache.encode("[SEP]dog[SEP]play", "")
    assert tokenizer.decode(encoded.token_ids, skip_special_tokens=False) == "[SEP] dog [SEP] play"
    assert encoded.turn == b""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 40), st.booleans()), max_size=25))
def test_memory_stays_within_its_bound_whatever_comes(tiny: Model, steps: list[tuple[int, int, bool]]) -> None:
    cache = tiny.cache(max_bytes=6000)
    for number, length, generates in steps:
        chat = [f"{number} the fox" * length]
        if generates:
            answer(tiny, cache, chat, letters(tiny, "dog" * length))
        text = tiny.prompt(chat)
        assert cache.encode(text, "").token_ids == tiny.plain(text)
        assert cache.num_bytes == sum(entry.num_bytes for entry in cache._entries.values()) <= 6000


def test_a_segment_too_big_to_keep_pushes_nothing_else_out(tiny: Model) -> None:
    cache = tiny.cache(max_bytes=8000)
    cache.encode(tiny.prompt(["the fox"]), "")
    before = set(cache._entries)
    big = tiny.prompt(["a b " * 2000])
    assert cache.encode(big, "").token_ids == tiny.plain(big)
    assert before <= set(cache._entries)
    assert cache.num_bytes < 8000


def test_what_is_used_stays_and_what_is_not_used_makes_room(tiny: Model) -> None:
    cache = tiny.cache(max_bytes=12_000)
    cache.encode(tiny.prompt(["the fox"]), "")
    first = dict(cache._entries)
    for number in range(40):
        for content in (f"{number}", "the fox"):
            cache.encode(tiny.prompt([content]), "")
    assert all(cache._entries.get(key) is entry for key, entry in first.items())
    known = {text for _, text in cache._entries}
    assert "<s>user\n39" in known
    assert "<s>user\n0" not in known


def test_of_one_text_in_many_chats_the_latest_are_known(tiny: Model) -> None:
    cache, drawn = tiny.cache(), letters(tiny, "the dog")
    for number in range(MAX_TURNS_PER_TEXT + 1):
        answer(tiny, cache, [f"{number}"], drawn)
    for number, is_known in ((0, False), (1, True), (MAX_TURNS_PER_TEXT, True)):
        text = tiny.prompt([f"{number}", "the dog"])
        assert (cache.encode(text, "").token_ids != tiny.plain(text)) == is_known


def test_many_threads_at_once_get_the_same_ids(real: Model) -> None:
    cache = real.cache(max_bytes=20_000)
    texts = [real.prompt([f"{n % 7} the quick fox", "jumps " * (n % 5), "over"]) for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda text: cache.encode(text, "").token_ids, texts))
    assert made == [real.plain(text) for text in texts]
    assert cache.num_bytes <= 20_000


def test_what_was_drawn_as_any_encoder_would_have_it_takes_no_memory_twice(tiny: Model) -> None:
    cache = tiny.cache()
    text = tiny.prompt(["the fox", "the dog", "x"])
    cache.encode(text, "")
    before = cache.num_bytes
    answer(tiny, cache, ["the fox"], tiny.plain("the dog"))
    assert cache.num_bytes == before
    assert cache.encode(text, "").token_ids == tiny.plain(text)
