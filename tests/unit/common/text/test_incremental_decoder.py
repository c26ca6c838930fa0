from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from common.text.incremental_decoder import ByteDecoder, WindowDecoder, open_decoder
from common.text.model_tokenizer import ModelTokenizer
from tests.unit.common.text import folders

MAKERS = [folders.byte_level, folders.byte_fallback, folders.metaspace, folders.word_piece, folders.word_ends,
          folders.no_decoder]
TEXTS = ["naïve 🙂🌶️ 日本語", "👨‍👩‍👧‍👦 family", "🇩🇪🇯🇵 flags", "e\u0301 combining a\u0308\u0323", "\ufffd itself \ufffd",
         "العربية", "𝔘𝔫𝔦", "\x00\x7f\u2028", "   spaces   ", ""]


@pytest.fixture(scope="module", params=MAKERS, ids=lambda m: m.__name__)
def any_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer.load(folders.write_folder(tmp_path_factory.mktemp("model"), request.param))


@pytest.fixture(scope="module")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer.load(folders.write_folder(tmp_path_factory.mktemp("fallback"), folders.byte_fallback))


@pytest.fixture(scope="module")
def real_tokenizer(smollm2: Path) -> ModelTokenizer:
    return ModelTokenizer.load(smollm2)


@pytest.fixture(scope="module")
def not_ascii(real_tokenizer: ModelTokenizer) -> list[int]:
    """Ids with bytes beyond ASCII, half characters among them."""
    return [i for i, raw in enumerate(real_tokenizer.token_bytes or ()) if not raw.isascii()]


def joined(tokenizer: ModelTokenizer, ids: list[int], cuts: list[int], *, skip: bool) -> str:
    decoder = open_decoder(tokenizer, skip_special_tokens=skip)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return "".join(decoder.push(ids[a:b]) for a, b in itertools.pairwise(edges)) + decoder.finish()


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_any_ids_cut_anywhere_give_the_decode_of_the_whole(
    any_tokenizer: ModelTokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=30))
    assert joined(any_tokenizer, ids, cuts, skip=skip) == any_tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(3, 270), max_size=12), st.booleans())
def test_runs_of_byte_tokens_are_whole_or_all_replaced(
    fallback_tokenizer: ModelTokenizer, ids: list[int], one_by_one: bool
) -> None:
    tokenizer = fallback_tokenizer
    cuts = list(range(len(ids))) if one_by_one else []
    assert joined(tokenizer, ids, cuts, skip=True) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_ids_of_the_real_vocabulary_give_the_decode_of_the_whole(
    real_tokenizer: ModelTokenizer, not_ascii: list[int], data: st.DataObject
) -> None:
    tokenizer = real_tokenizer
    one = st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(not_ascii), st.integers(0, 20))
    ids = data.draw(st.lists(one, max_size=24))
    for skip in (True, False):
        assert joined(tokenizer, ids, list(range(24)), skip=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_real_text_comes_back_byte_for_byte_one_token_at_a_time(real_tokenizer: ModelTokenizer, text: str) -> None:
    tokenizer = real_tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = list(map(ByteDecoder(tokenizer.token_bytes or (), frozenset()).push, ([i] for i in ids)))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_each_entry_of_the_byte_table_decodes_as_the_tokenizer_does(real_tokenizer: ModelTokenizer) -> None:
    tokenizer = real_tokenizer
    table = tokenizer.token_bytes
    assert table is not None
    assert len(table) == tokenizer.vocab_size
    for token_id, raw in enumerate(table):
        assert raw.decode(errors="replace") == tokenizer.decode([token_id], skip_special_tokens=False)


def test_an_incomplete_character_is_held_back_and_flushed_as_the_full_decode_has_it(
    real_tokenizer: ModelTokenizer
) -> None:
    tokenizer = real_tokenizer
    assert tokenizer.token_bytes is not None
    ids = [tokenizer.token_bytes.index(bytes([b])) for b in "🙂".encode()[:3]]
    decoder = open_decoder(tokenizer, skip_special_tokens=True)
    assert [decoder.push([i]) for i in ids] == ["", "", ""]
    assert decoder.finish() == tokenizer.decode(ids, skip_special_tokens=True) == "\ufffd"


def test_the_window_decoder_agrees_with_the_byte_table(any_tokenizer: ModelTokenizer) -> None:
    for text in TEXTS:
        ids = any_tokenizer.encode(text, add_special_tokens=False)
        window = WindowDecoder(any_tokenizer, skip_special_tokens=True)
        text_out = "".join(window.push([i]) for i in ids) + window.finish()
        assert text_out == any_tokenizer.decode(ids, skip_special_tokens=True)


def test_the_window_stays_short_on_ordinary_text(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(folders.write_folder(tmp_path, folders.metaspace))
    decoder = WindowDecoder(tokenizer, skip_special_tokens=True)
    decoder.push([3, 5] * 500)
    assert len(decoder._window) <= 4


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_long_runs_that_end_in_replacement_characters_give_the_decode_of_the_whole(
    any_tokenizer: ModelTokenizer, data: st.DataObject
) -> None:
    tokenizer = any_tokenizer
    odd = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([i], skip_special_tokens=False)]
    one = st.one_of(st.sampled_from(odd or [2]), st.integers(0, tokenizer.vocab_size - 1))
    run = st.lists(st.sampled_from(odd or [2]), min_size=15, max_size=60)
    for ids in (data.draw(run) + data.draw(st.lists(one, max_size=40)), data.draw(st.lists(one, max_size=3)) * 20):
        decoder = WindowDecoder(tokenizer, skip_special_tokens=False)
        text = "".join([decoder.push((i,)) for i in ids]) + decoder.finish()
        assert text == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_run_of_replacement_characters_streams_and_the_window_stays_short(
    fallback_tokenizer: ModelTokenizer
) -> None:
    bad = fallback_tokenizer._tokenizer.token_to_id("\ufffd")
    decoder = WindowDecoder(fallback_tokenizer, skip_special_tokens=True)
    num_chars = 0
    for num_pushed in range(1, 501):
        num_chars += len(decoder.push((bad,)))
        assert len(decoder._window) < 20
        assert num_pushed - num_chars < 20
    assert num_chars + len(decoder.finish()) == 500


def test_tokens_that_each_end_within_a_character_stream_before_they_end(tmp_path: Path) -> None:
    """The tail of one character and the head of the next, for ever: each decode ends in U+FFFD."""
    vocab = {"</s>": 0, "x": 1, "ðŁ": 2, "ĻĤðŁ": 3, "ĻĤ": 4}
    made = Tokenizer(models.WordLevel(vocab, unk_token="x"))
    made.decoder = decoders.ByteLevel()
    tokenizer = ModelTokenizer.load(folders.write_folder(tmp_path, lambda: made))
    decoder = WindowDecoder(tokenizer, skip_special_tokens=True)
    ids = [1, 2, *[3] * 200, 4]
    pieces = [decoder.push((i,)) for i in ids]
    assert "".join(pieces) + decoder.finish() == "x" + "🙂" * 201
    assert len("".join(pieces[:100])) > 80
