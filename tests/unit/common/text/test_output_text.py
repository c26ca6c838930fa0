from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.text.model_tokenizer import ModelTokenizer
from common.text.output_text import OutputText
from tests.unit.common.text import folders


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer.load(folders.write_folder(tmp_path_factory.mktemp("model")))


def test_num_tokens_at_a_stop_counts_the_token_that_completed_it_and_none_after(smollm2: Path) -> None:
    tokenizer = ModelTokenizer.load(smollm2)
    ids = [i for char in "ABCDEFGHIJKL" for i in tokenizer.encode(char, add_special_tokens=False)]
    text = OutputText(tokenizer, stop=["DEFGHIJ"])
    delta = text.push(ids)
    assert (delta.text, delta.num_tokens, delta.matched_stop, delta.finished) == ("ABC", 10, "DEFGHIJ", True)
    assert text.push(ids).text == ""
    assert text.finish().num_tokens == 10


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_outcome_does_not_depend_on_how_tokens_were_pushed(tokenizer: ModelTokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    stops = data.draw(st.lists(st.sampled_from(["a", "fox", "th", " ", "\ufffd", "日", "e q"]), max_size=2))
    whole, single = OutputText(tokenizer, stop=stops), OutputText(tokenizer, stop=stops)
    at_once = [whole.push(ids), whole.finish()]
    by_one = [*(single.push([i]) for i in ids), single.finish()]
    assert "".join(d.text for d in at_once) == "".join(d.text for d in by_one)
    assert (at_once[-1].num_tokens, at_once[-1].matched_stop) == (by_one[-1].num_tokens, by_one[-1].matched_stop)


def test_without_a_stop_all_tokens_count_and_the_text_is_the_decode(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("the fox 🙂 日本", add_special_tokens=False)
    text = OutputText(tokenizer)
    deltas = [*(text.push([i]) for i in ids), text.finish()]
    assert "".join(d.text for d in deltas) == "the fox 🙂 日本"
    assert deltas[-1].num_tokens == len(ids)
    assert deltas[-1].finished


def test_special_tokens_show_only_when_asked_for(tokenizer: ModelTokenizer) -> None:
    assert OutputText(tokenizer).push([1]).text == ""
    assert OutputText(tokenizer, skip_special_tokens=False).push([1]).text == "</s>"
    assert OutputText(tokenizer, skip_special_tokens=False, stop=["</s>"]).push([1]).matched_stop == "</s>"
