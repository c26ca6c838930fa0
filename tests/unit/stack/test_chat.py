from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import cast

import pytest

from common.errors import Unavailable
from stack.api_client import ApiClient, Json
from stack.chat import Conversation, Turn, command


def chunk(text: str) -> Json:
    return {"choices": [{"delta": {"content": text}}]}


USAGE: Json = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3,
                                        "prompt_tokens_details": {"cached_tokens": 8}}}


class FakeApi:
    """Streams `events`; an exception among them is raised there."""

    def __init__(self, *events: Json | BaseException | None) -> None:
        self.events = events
        self.bodies: list[Json] = []
        self.closed = 0
        self._held: list[object] = []  # or the garbage collector would do the closing

    def stream(self, _path: str, body: Json) -> Generator[Json | None, None, None]:
        self.bodies.append(json.loads(json.dumps(body)))
        self._held.append(events := self._events())
        return events

    def _events(self) -> Generator[Json | None, None, None]:
        try:
            for event in self.events:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self.closed += 1


def talk(*events: Json | BaseException | None) -> tuple[Conversation, FakeApi]:
    api = FakeApi(*events)
    return Conversation(cast(ApiClient, api), "m"), api


def test_an_answer_is_written_as_it_comes_and_joins_the_history() -> None:
    conversation, api = talk(chunk("Pa"), chunk("ris"), USAGE, None)
    conversation.system = "be brief"
    written: list[str] = []
    turn = conversation.ask("capital?", written.append)
    conversation.ask("sure?", written.append)
    assert "".join(written[:2]) == turn.text == "Paris"
    assert (turn.num_prompt_tokens, turn.num_cached_tokens, turn.num_output_tokens) == (9, 8, 3)
    assert [m["role"] for m in api.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert api.bodies[0]["stream_options"] == {"include_usage": True}


def test_a_cancelled_answer_closes_the_stream_and_keeps_what_was_said() -> None:
    conversation, api = talk(chunk("Once upon"), KeyboardInterrupt())
    turn = conversation.ask("a story", lambda _text: None)
    assert turn.cancelled
    assert api.closed == 1
    assert conversation.messages[-1] == {"role": "assistant", "content": "Once upon"}
    assert "cancelled" in turn.line()


def test_an_interrupt_while_writing_closes_the_stream_too() -> None:
    conversation, api = talk(chunk("a"), chunk("b"), None)

    def interrupt(_text: str) -> None:
        raise KeyboardInterrupt

    assert conversation.ask("x", interrupt).cancelled
    assert api.closed == 1


def test_a_failed_turn_leaves_the_history_as_it_was() -> None:
    conversation, _api = talk(chunk("half"), Unavailable("worker lost"))
    with pytest.raises(Unavailable):
        conversation.ask("x", lambda _text: None)
    assert conversation.messages == []


def test_the_line_after_a_turn_tells_ttft_speed_and_tokens() -> None:
    turn = Turn()
    turn.take(chunk("a"), 0.5)
    turn.take(chunk("b"), 1.0)
    turn.take(chunk("c"), 1.5)
    turn.take(USAGE, 1.6)
    assert turn.line() == "[TTFT 0.500 s, 2.0 tok/s, prompt 9 (cached 8), output 3 tokens]"


def test_the_commands_change_clear_and_save_the_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    conversation, _api = talk(chunk("hello"), USAGE, None)
    conversation.ask("hi", lambda _text: None)
    assert command(conversation, "/system be kind")
    assert command(conversation, f"/save {tmp_path / 'kept.json'}")
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert (kept["system"], len(kept["messages"])) == ("be kind", 2)
    assert command(conversation, "/reset")
    assert conversation.messages == []
    assert command(conversation, "/stats")
    assert command(conversation, "/what")
    assert command(conversation, f"/save {tmp_path}/none/x")
    assert not command(conversation, "/quit")
    said = capsys.readouterr().out
    assert "1 answers, 0 cancelled" in said
    assert "cannot save" in said
