from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.generation import FinishReason
from gateway.order import Ending, Piece, Usage, new_request_id
from gateway.responses import Chunks, Kind, whole_body

USAGE = Usage(5, 2, 3)
ENDING = Ending(FinishReason.STOP, "x", USAGE, fingerprint="shoal-1")


def parsed(event: bytes) -> list[Any]:
    return [json.loads(e.removeprefix("data: ")) for e in event.decode().split("\n\n") if e and "[DONE]" not in e]


@given(st.text(min_size=1), st.sampled_from(["chat", "completion"]))
def test_any_text_makes_one_valid_event_that_gives_it_back(text: str, kind: Kind) -> None:
    chunks = Chunks(kind, "id", 'a "model"', include_usage=False, usage_on_every_chunk=False)
    piece = Piece(text, USAGE, fingerprint="shoal-1")
    chunks.begin(piece)
    [chunk] = parsed(chunks.content(piece))
    choice = chunk["choices"][0]
    assert (choice["delta"]["content"] if kind == "chat" else choice["text"]) == text
    assert chunk["model"] == 'a "model"'


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("include", [False, True])
def test_the_end_has_the_reason_once_the_usage_when_asked_and_done(kind: Kind, include: bool) -> None:
    chunks = Chunks(kind, "id", "m", include_usage=include, usage_on_every_chunk=False)
    chunks.begin(Piece("", USAGE, fingerprint="shoal-1"))
    end = chunks.end(ENDING)
    assert end.endswith(b"data: [DONE]\n\n")
    finish, *usage = parsed(end)
    assert (finish["choices"][0]["finish_reason"], finish["choices"][0]["stop_reason"]) == ("stop", "x")
    assert ("usage" in finish) == include
    assert [u["usage"]["total_tokens"] for u in usage] == ([8] if include else [])


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_whole_body_has_the_text_and_the_counts(kind: Kind) -> None:
    body = json.loads(whole_body(kind, "id", "m", "hé", ENDING))
    choice = body["choices"][0]
    assert (choice["message"]["content"] if kind == "chat" else choice["text"]) == "hé"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_request_ids_are_unique_and_ordered_by_time() -> None:
    ids = [new_request_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {len(i) for i in ids} == {32}
    assert [i[:12] for i in ids] == sorted(i[:12] for i in ids)
