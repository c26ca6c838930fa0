from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest, ModelLoadError
from common.text.model_tokenizer import ModelTokenizer
from tests.unit.common.text import folders


def test_the_real_model_says_what_its_files_say(smollm2: Path) -> None:
    tokenizer = ModelTokenizer.load(smollm2)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.bos_token_id) == (49152, (2,), 1)
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.token_string(2) == "<|im_end|>"


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path) -> None:
    folder = folders.write_folder(tmp_path)
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    raw["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                      "pad_type_id": 0, "pad_token": "<s>"}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    ids = ModelTokenizer.load(folder).encode("a b c d e f g h", add_special_tokens=True)
    assert 3 < len(ids) < 64


@pytest.mark.parametrize(("name", "text"), [
    ("tokenizer.json", None), ("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer.json", "[]"),
    ("config.json", "not json"), ("config.json", '{"vocab_size": "many"}'), ("generation_config.json", "[1]"),
])
def test_a_broken_folder_is_refused_naming_the_file(tmp_path: Path, name: str, text: str | None) -> None:
    folder = folders.write_folder(tmp_path)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(ModelLoadError, match=name):
        ModelTokenizer.load(folder)


def test_end_tokens_come_from_generation_config_then_config_then_the_tokenizer(tmp_path: Path) -> None:
    folder = folders.write_folder(tmp_path, eos_token_id=7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert ModelTokenizer.load(folder).eos_token_ids == (5, 6)
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    assert ModelTokenizer.load(folder).eos_token_ids == (7,)
    (folder / "config.json").write_text("{}")
    assert ModelTokenizer.load(folder).eos_token_ids == (1,)


def test_ids_in_the_models_padding_are_valid_and_have_no_text(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(folders.write_folder(tmp_path, vocab_size=1000))
    tokenizer.check([999])
    assert tokenizer.decode([999], skip_special_tokens=False) == ""
    assert tokenizer.token_string(999) == ""


@pytest.fixture(scope="module", params=[
    folders.byte_level, folders.byte_fallback, folders.metaspace, folders.word_piece, folders.no_decoder])
def any_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer.load(folders.write_folder(tmp_path_factory.mktemp("model"), request.param))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_bytes_of_single_tokens_joined_are_the_text_of_the_whole(
    any_tokenizer: ModelTokenizer, data: st.DataObject
) -> None:
    known = [i for i in range(any_tokenizer.vocab_size)
             if any_tokenizer.token_string(i) and i not in any_tokenizer.byte_tokens]
    ids = data.draw(st.lists(st.sampled_from(known), max_size=12))
    text = any_tokenizer.decode(ids, skip_special_tokens=False)
    joined = b"".join(map(any_tokenizer.bytes_of, ids)).decode("utf-8", "replace")
    if "##ing" in map(any_tokenizer.token_string, known):  # this decoder joins, by rules that need the whole
        joined, text = joined.replace(" ", "").replace("##", ""), text.replace(" ", "").replace("##", "")
    assert joined.lstrip(" ") == text.lstrip(" "), "only what decoders trim where a text begins"


def test_a_byte_token_is_its_byte_and_an_id_without_a_token_is_nothing(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(folders.write_folder(tmp_path, folders.byte_fallback, vocab_size=1000))
    assert [tokenizer.bytes_of(3 + byte) for byte in (0, 0xE2, 255)] == [b"\0", b"\xe2", b"\xff"]
    assert tokenizer.bytes_of(999) == b""
    assert ModelTokenizer.load(folders.write_folder(tmp_path / "b", vocab_size=1000)).bytes_of(999) == b""


@pytest.mark.parametrize("token_id", [-1, 1000, 2**31])
def test_an_id_outside_the_vocabulary_is_refused_naming_it_and_the_limit(tmp_path: Path, token_id: int) -> None:
    tokenizer = ModelTokenizer.load(folders.write_folder(tmp_path, vocab_size=1000))
    with pytest.raises(InvalidRequest, match=rf"{token_id} is outside the vocabulary 0\.\.999"):
        tokenizer.check([1, token_id, 2])


def test_text_with_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(folders.write_folder(tmp_path, vocab_size=300))
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        tokenizer.encode("<think now>", add_special_tokens=False)


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        ModelTokenizer.load(folders.write_folder(tmp_path)).encode("a\ud800b", add_special_tokens=False)
