from __future__ import annotations

import pytest

from common.errors import InvalidRequest, ModelNotFound, NotFound, Overloaded
from common.tokenized import TextDelta
from tests.unit.common.text import folders
from tokenizer_svc.detokenizer import Detokenizer, Item, Opening, Session
from tokenizer_svc.served_models import ServedModels

OPEN = Opening("m")


@pytest.fixture
def models(tmp_path_factory: pytest.TempPathFactory) -> ServedModels:
    folder = folders.write_folder(tmp_path_factory.mktemp("model"))
    return ServedModels.load({"m": folder}, max_text_bytes=1000, render_timeout_s=1.0)


@pytest.fixture
def detokenizer(models: ServedModels) -> Detokenizer:
    return Detokenizer(models, max_streams=3)


def ids(models: ServedModels, text: str) -> list[int]:
    return models.get("m").tokenizer.encode(text, add_special_tokens=False)


def delta(session: Session, item: Item) -> TextDelta:
    [(stream_id, answer)] = session.step([item])
    assert stream_id == item.stream_id
    assert isinstance(answer, TextDelta), answer
    return answer


def test_streams_of_one_batch_are_answered_in_order_and_apart(models: ServedModels, detokenizer: Detokenizer) -> None:
    session = detokenizer.open_session()
    answers = session.step([Item(7, ids(models, "the fox"), OPEN), Item(3, ids(models, "日本"), OPEN)])
    assert [(i, a.text) for i, a in answers if isinstance(a, TextDelta)] == [(7, "the fox"), (3, "日本")]
    assert detokenizer.num_streams == 2


def test_open_tokens_and_flush_may_come_in_one_item(models: ServedModels, detokenizer: Detokenizer) -> None:
    session = detokenizer.open_session()
    answer = delta(session, Item(1, ids(models, "the 🙂"), OPEN, flush=True))
    assert (answer.text, answer.finished) == ("the 🙂", True)
    assert detokenizer.num_streams == 0


def test_a_stop_string_ends_the_stream_and_frees_it(models: ServedModels, detokenizer: Detokenizer) -> None:
    session = detokenizer.open_session()
    answer = delta(session, Item(1, ids(models, "the quick fox"), Opening("m", stop=(" quick",))))
    assert (answer.text, answer.matched_stop, answer.finished) == ("the", " quick", True)
    assert detokenizer.num_streams == 0


def test_close_is_not_answered_and_frees_the_stream(models: ServedModels, detokenizer: Detokenizer) -> None:
    session = detokenizer.open_session()
    session.step([Item(1, ids(models, "a"), OPEN)])
    assert session.step([Item(1, close=True), Item(9, close=True)]) == []
    assert detokenizer.num_streams == 0


def test_the_end_of_a_session_frees_its_streams_alone(models: ServedModels, detokenizer: Detokenizer) -> None:
    first, second = detokenizer.open_session(), detokenizer.open_session()
    first.step([Item(1, (), OPEN), Item(2, (), OPEN)])
    second.step([Item(1, (), OPEN)])
    first.close()
    assert detokenizer.num_streams == 1
    assert delta(second, Item(1, ids(models, "a"))).text == "a"


def test_a_faulty_item_is_its_own_answer_and_leaves_the_others_alone(
    models: ServedModels, detokenizer: Detokenizer
) -> None:
    session = detokenizer.open_session()
    answers = session.step([
        Item(1, (), Opening("nope")), Item(2, (5,)), Item(3, (), Opening("m", stop=("",))),
        Item(4, ids(models, "ok"), OPEN)])
    assert [type(a) for _, a in answers] == [ModelNotFound, NotFound, InvalidRequest, TextDelta]
    assert detokenizer.num_streams == 1


def test_one_stream_id_cannot_be_opened_twice(detokenizer: Detokenizer) -> None:
    session = detokenizer.open_session()
    [_, (_, answer)] = session.step([Item(1, (), OPEN), Item(1, (), OPEN)])
    assert isinstance(answer, InvalidRequest)


def test_one_stream_more_than_the_bound_is_refused_until_one_ends(detokenizer: Detokenizer) -> None:
    session = detokenizer.open_session()
    answers = session.step([Item(i, (), OPEN) for i in range(4)])
    assert isinstance(answers[3][1], Overloaded)
    session.step([Item(0, close=True)])
    assert delta(session, Item(5, (), OPEN)).text == ""


@pytest.fixture
def turn(models: ServedModels) -> bytes:
    made = models.get("m").segments.encode("</s><|user|>hi</s>", "").turn
    assert made
    return made


@pytest.mark.parametrize(("said", "stop", "closes", "kept"), [
    (["q", "u", "i"], (), False, "qui"),
    (["q", "u", "i", " the"], (" the",), False, "qui"),
    (["q", "u", "i"], (), True, None),
], ids=["flushed", "stopped", "closed"])
def test_a_finished_stream_leaves_its_ids_for_the_prompts_that_follow(
    models: ServedModels, detokenizer: Detokenizer, turn: bytes, said: list[str], stop: tuple[str, ...], closes: bool,
    kept: str | None
) -> None:
    session, drawn = detokenizer.open_session(), [i for piece in said for i in ids(models, piece)]
    session.step([Item(1, drawn[:2], Opening("m", stop=stop, turn=turn)), Item(1, drawn[2:], flush=not closes),
                  Item(1, close=True)])
    text = "</s><|user|>hi</s>qui</s>"
    plain = tuple(ids(models, text))
    exact = [i for piece in ("</s><|user|>hi</s>", *(kept or ""), "</s>") for i in ids(models, piece)]
    again = models.get("m").segments.encode(text, "").token_ids
    assert again == (plain if kept is None else tuple(exact))
    assert kept is None or again != plain


def test_a_turn_that_no_tokenizer_made_is_refused_and_opens_nothing(detokenizer: Detokenizer) -> None:
    [(_, answer)] = detokenizer.open_session().step([Item(1, (5,), Opening("m", turn=b"x"))])
    assert isinstance(answer, InvalidRequest)
    assert answer.param == "turn"
    assert detokenizer.num_streams == 0
