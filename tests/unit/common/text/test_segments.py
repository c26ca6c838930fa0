from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    PreTokenizedString,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from common.text.model_tokenizer import ModelTokenizer
from common.text.segments import Segmenter, find_segmenter
from tests.unit.common.text import folders

ENDS = ("<s>", "</s>")
PIECES = [*ENDS, "<|im_start|>", "<|im_end|>", "<|im_", "|>", "</", "s>", " ", "\n", "  x", "the fox", "日本 é", "_a1",
          "▁"]


def spaced_first() -> Tokenizer:
    """As newer SentencePiece models: only the very start of a text gets a space."""
    tokenizer = folders.metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def spaced_everywhere() -> Tokenizer:
    """As Llama 2: every piece gets a space by the normalizer."""
    tokenizer = folders.byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def composed() -> Tokenizer:
    tokenizer = folders.byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def beside_greedy_tokens() -> Tokenizer:
    """Tokens that take the white space beside them, and one that the normalizer may make."""
    tokenizer = folders.byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", rstrip=True), AddedToken("<|im_start|>", lstrip=True)])
    tokenizer.add_tokens([AddedToken("the fox", normalized=True), AddedToken("_a1", single_word=True)])
    return tokenizer


MAKERS = [folders.byte_level, folders.byte_fallback, folders.metaspace, folders.word_piece, folders.word_ends,
          folders.no_decoder, spaced_first, spaced_everywhere, composed, beside_greedy_tokens]


@pytest.fixture(scope="module", params=MAKERS, ids=lambda m: m.__name__)
def any_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer.load(folders.write_folder(tmp_path_factory.mktemp("model"), request.param))


@pytest.fixture(scope="module")
def real_tokenizer(smollm2: Path) -> ModelTokenizer:
    return ModelTokenizer.load(smollm2)


def cut_ids(tokenizer: ModelTokenizer, segmenter: Segmenter, text: str) -> list[int]:
    return [i for ids in tokenizer.encode_each(segmenter.cut(text), add_special_tokens=False) for i in ids]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=12))
def test_a_text_cut_at_its_special_tokens_has_the_ids_of_the_whole(
    any_tokenizer: ModelTokenizer, pieces: list[str]
) -> None:
    segmenter, text = any_tokenizer.segmenter(PIECES), "".join(pieces)
    assert "".join(segmenter.cut(text)) == text
    assert cut_ids(any_tokenizer, segmenter, text) == any_tokenizer.encode(text, add_special_tokens=False)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=20))
def test_the_real_tokenizer_cut_has_the_ids_of_the_whole(real_tokenizer: ModelTokenizer, pieces: list[str]) -> None:
    segmenter, text = real_tokenizer.segmenter(PIECES), "".join(pieces)
    assert segmenter.cut_tokens == ("<|im_end|>", "<|im_start|>")
    assert cut_ids(real_tokenizer, segmenter, text) == real_tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("text", "segments"), [
    ("", []), ("a", ["a"]), ("<s>", ["<s>"]), ("a<s>b", ["a", "<s>b"]), ("<s>a</s>\n<s>", ["<s>a", "</s>\n", "<s>"]),
    ("<s><s>x", ["<s>", "<s>x"]), ("<S>", ["<S>"]),
])
def test_a_segment_begins_with_its_token_and_none_is_empty(text: str, segments: list[str]) -> None:
    assert Segmenter(ENDS).cut(text) == segments
    assert Segmenter(()).cut(text) == ([text] if text else [])


def word_level(*tokens: AddedToken) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<|plain|>"), *tokens])
    return tokenizer


@pytest.mark.parametrize("token", [
    AddedToken("<|x|>", lstrip=True), AddedToken("<|x|>", single_word=True), AddedToken("<|x|>", normalized=True),
    AddedToken("x|>"), AddedToken("_x|>"), AddedToken(" <|x|>"),
], ids=["lstrip", "single-word", "normalized", "word-character", "underscore", "space"])
def test_a_token_that_looks_at_what_is_before_it_is_no_place_to_cut(token: AddedToken) -> None:
    assert find_segmenter(word_level(token), ["<|plain|>", token.content]).cut_tokens == ("<|plain|>",)
    assert find_segmenter(word_level(), ["<|plain|>", token.content]).cut_tokens == ("<|plain|>",)


@pytest.mark.parametrize("other", ["<|plain|>>", "a<|plain|>", "a<|", "<|plain|><|plain|>", "<<"])
def test_a_token_that_another_one_can_hide_is_no_place_to_cut(other: str) -> None:
    tokenizer = word_level(AddedToken(other, normalized=False))
    assert "<|plain|>" not in find_segmenter(tokenizer, ["<|plain|>"]).cut_tokens


def test_a_token_that_is_not_special_or_not_wanted_is_no_place_to_cut() -> None:
    tokenizer = word_level(AddedToken("<|b|>"))
    tokenizer.add_tokens([AddedToken("<|c|>", normalized=False)])
    assert find_segmenter(tokenizer, ["<|b|>", "<|c|>", "<|none|>"]).cut_tokens == ("<|b|>",)


def test_a_tokenizer_whose_samples_differ_is_never_cut() -> None:
    class FirstPiecesOnly:
        def pre_tokenize(self, text: PreTokenizedString) -> None:
            text.split(lambda index, piece: [piece] if index < 2 else [])

    tokenizer = folders.byte_level()
    assert find_segmenter(tokenizer, ENDS).cut_tokens == ("</s>", "<s>")
    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(FirstPiecesOnly())
    assert find_segmenter(tokenizer, ENDS).cut_tokens == ()


@pytest.mark.parametrize("change", [
    lambda raw: raw["model"].update(dropout=0.1),
    lambda raw: raw["pre_tokenizer"].update(type="Oracle"),
    lambda raw: raw.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Oracle"}]}),
], ids=["random-merges", "unknown-part", "unknown-member"])
def test_a_tokenizer_with_a_part_that_is_not_known_to_be_piecewise_is_never_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]
) -> None:
    folder = folders.write_folder(tmp_path)
    library_own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw = json.loads((folder / "tokenizer.json").read_text())
    assert ModelTokenizer.load(folder).segmenter(ENDS).cut_tokens == ("</s>", "<s>")
    change(raw)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    monkeypatch.setattr(  # the library itself refuses parts that it does not know
        "common.text.model_tokenizer._read_tokenizer", lambda _: (library_own, raw))
    assert ModelTokenizer.load(folder).segmenter(ENDS).cut_tokens == ()
