"""Where tokens begin in the text that a client reads, for each kind of decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.generation import TokenLogprobs
from common.text.model_tokenizer import ModelTokenizer
from common.text.output_text import OutputText
from common.tokenized import TokenText
from gateway.logprob_shapes import CompletionLogprobs
from tests.unit.common.text import folders


def load(folder: Path, make: object) -> ModelTokenizer:
    return ModelTokenizer.load(folders.write_folder(folder, make))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load(tmp_path_factory.mktemp("fallback"), folders.byte_fallback)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load(tmp_path_factory.mktemp("bytes"), folders.byte_level)


def offsets(
    tokenizer: ModelTokenizer, ids: Sequence[int], *, stop: tuple[str, ...] = (), num_chars: int = 0
) -> tuple[str, list[int]]:
    """The text of the tokens, and where each begins; tokens wait for their text, but the first does not."""
    texts = {i: TokenText(tokenizer.bytes_of(i), i in tokenizer.special_ids) for i in ids}
    shapes = CompletionLogprobs(0, skip_special_tokens=True, as_ids=False, num_chars=num_chars)
    output, waiting, parts = OutputText(tokenizer, stop=stop), list[int](), list[str]()
    found: list[int] = []
    for index, token_id in enumerate(ids):
        text = output.push((token_id,)).text
        if index == len(ids) - 1:
            text += output.finish().text
        waiting.append(token_id)
        if text or index in (0, len(ids) - 1):
            found += shapes.of(waiting, [TokenLogprobs(-1.0)] * len(waiting), texts, text)["text_offset"]
            waiting = []
            parts.append(text)
    return "".join(parts), found


def ids_of(tokenizer: ModelTokenizer, *tokens: str) -> list[int]:
    found = [tokenizer._tokenizer.token_to_id(token) for token in tokens]
    assert None not in found
    return found


@pytest.mark.parametrize(("tokens", "text", "begins"), [
    (("▁the", "▁fox", "a"), "the foxa", [0, 3, 7]),
    (("a", "▁the", "▁fox"), "a the fox", [0, 1, 5]),
    (("▁", "a", "▁fox"), "a fox", [0, 0, 1]),
    (("▁", "▁the", "a"), " thea", [0, 0, 4]),
    (("<s>", "▁the", "a"), "thea", [0, 0, 3]),
    (("▁", "<0xC3>", "<0xA9>", "a"), "éa", [0, 0, 0, 1]),
])
def test_tokens_begin_where_the_text_shows_them_though_its_first_space_is_dropped(
    fallback: ModelTokenizer, tokens: tuple[str, ...], text: str, begins: list[int]
) -> None:
    ids = ids_of(fallback, *tokens)
    assert offsets(fallback, ids) == (text, begins)
    assert offsets(fallback, ids, num_chars=7) == (text, [7 + begin for begin in begins])  # behind an echoed prompt


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_offsets_of_whole_pieces_cut_the_text_into_the_tokens_own_texts(
    fallback: ModelTokenizer, data: st.DataObject
) -> None:
    pieces = ids_of(fallback, "▁", "▁the", "▁fox", "a", "b", "é", ".")
    ids = data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=8))
    text, begins = offsets(fallback, ids)
    raw = [fallback.bytes_of(i).decode() for i in ids]
    cut = [text[begin:end] for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]
    assert cut == [raw[0].removeprefix(" "), *raw[1:]]


@pytest.mark.parametrize("stop", [(), (" q",), ("  ",)])
def test_a_space_that_the_decoder_keeps_is_counted_also_while_a_stop_string_holds_it_back(
    byte_level: ModelTokenizer, stop: tuple[str, ...]
) -> None:
    ids = byte_level.encode(" the é fox", add_special_tokens=False)
    text, begins = offsets(byte_level, ids, stop=stop)
    assert text == " the é fox"
    raw = [byte_level.bytes_of(i) for i in ids]
    assert begins == [len(b"".join(raw[:i]).decode(errors="ignore")) for i in range(len(ids))]


def test_tokens_whose_text_is_all_held_back_keep_their_space(byte_level: ModelTokenizer) -> None:
    ids = byte_level.encode(" a b", add_special_tokens=False)
    texts = {i: TokenText(byte_level.bytes_of(i)) for i in ids}
    shapes = CompletionLogprobs(0, skip_special_tokens=True, as_ids=False)
    begins = shapes.of(ids, [TokenLogprobs(-1.0)] * len(ids), texts, "")["text_offset"]
    assert begins == [len(b"".join(texts[i].raw for i in ids[:num])) for num in range(len(ids))]
    assert len(begins) > 1
