from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.state import GrammarState

VOCAB = 49152
ENDS = frozenset((0, 2))
LONG_KEYS = {"type": "object", "properties": {
    "first_name_of_the_customer": {"type": "string", "maxLength": 10}, "is_active_customer": {"type": "boolean"},
    "größe": {"enum": ["klein", "mittel"]}},
    "required": ["first_name_of_the_customer", "is_active_customer", "größe"], "additionalProperties": False}
TEXT = '{"first_name_of_the_customer": "Bob", "is_active_customer": true, "größe": "klein"}'


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> GrammarCompiler:
    return GrammarCompiler(smollm2, VOCAB, ENDS)


def _state(compiler: GrammarCompiler, text: Any, kind: GrammarKind = GrammarKind.JSON_SCHEMA) -> GrammarState:
    return compiler.compile(Grammar(kind, text if isinstance(text, str) else json.dumps(text)))


def _allowed(state: GrammarState) -> set[int]:
    words = np.full(VOCAB // 32, 0xA5A5A5A5, np.uint32)
    state.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_at_a_forced_place_only_the_run_s_first_token_is_allowed_and_the_run_is_the_canonical_one(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = _state(compiler, LONG_KEYS)
    forced = state.forced()
    text = tokenizer.decode(list(forced))
    assert text == '{"first_name_of_the_customer":'  # the space may belong to the value's first token
    assert list(forced) == tokenizer.encode(text, add_special_tokens=False).ids
    whole = state.fork()
    whole.accept(forced)
    for place, token in enumerate(forced):
        assert _allowed(state) == {token}
        assert state.forced() == forced[place:]
        state.accept([token])
    assert _allowed(state) == _allowed(whole)


def test_states_that_came_by_different_ways_are_the_same(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    one_by_one, at_once = _state(compiler, LONG_KEYS), _state(compiler, LONG_KEYS)
    for place, token in enumerate(ids):
        assert token in _allowed(one_by_one)
        if place % 5 == 0:
            replayed = _state(compiler, LONG_KEYS)  # after preemption, or on another worker
            replayed.accept(ids[:place])
            assert _allowed(replayed) == _allowed(one_by_one)
            assert replayed.forced() == one_by_one.forced()
        one_by_one.accept([token])
    at_once.accept(ids)
    assert one_by_one.is_finished
    assert at_once.is_finished
    assert at_once.forced() == ()


def test_a_rejected_token_is_an_error_and_changes_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = _state(compiler, LONG_KEYS)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    state.accept(ids[:3])
    before = (_allowed(state), state.forced())
    wrong = tokenizer.encode("#", add_special_tokens=False).ids
    for tokens in (wrong, [*ids[3:6], *wrong], [2], [*ids[3:5], 2], [VOCAB - 1], [2, ids[3]]):
        with pytest.raises(InvalidRequest, match="not allowed after 3 tokens"):
            state.accept(tokens)
        assert (_allowed(state), state.forced()) == before
    state.accept(ids[3:])
    assert state.is_finished


def test_an_end_token_is_allowed_exactly_where_the_text_may_end(compiler: GrammarCompiler) -> None:
    state = _state(compiler, "[0-9]{2,4}", GrammarKind.REGEX)
    digit = next(iter(_allowed(state)))
    for place in range(4):
        assert (_allowed(state) >= ENDS) == (place >= 2)
        assert (_allowed(state) & ENDS == set()) == (place < 2)
        state.accept([digit])
    assert state.is_finished
    assert _allowed(state) == ENDS


def test_after_an_end_token_nothing_follows(compiler: GrammarCompiler) -> None:
    state = _state(compiler, "a+", GrammarKind.REGEX)
    token = next(iter(_allowed(state)))
    state.accept([token])
    assert not state.is_finished
    other = state.fork()
    state.accept([2])
    assert state.is_finished
    assert state.fork().is_finished
    assert state.forced() == ()
    assert _allowed(state) == ENDS
    with pytest.raises(InvalidRequest):
        state.accept([token])
    assert not other.is_finished
    other.accept([token, 0])
    assert other.is_finished


def test_a_fork_goes_on_by_itself(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = _state(compiler, ["left", "right"], GrammarKind.CHOICE)
    other = state.fork()
    state.accept(tokenizer.encode("left", add_special_tokens=False).ids)
    other.accept(tokenizer.encode("right", add_special_tokens=False).ids)
    assert state.is_finished
    assert other.is_finished


def test_a_limit_that_is_hit_on_the_way_fails_this_state_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    regex = "[0-9]{20}(.*[ab].{0,50}){20}|[xy]+"
    state = _state(compiler, regex, GrammarKind.REGEX)
    other = state.fork()
    xs = tokenizer.encode("xyx", add_special_tokens=False).ids
    other.accept(xs)
    letters = tokenizer.encode("ab b a bb a ab", add_special_tokens=False).ids

    def go_on() -> None:
        state.accept(tokenizer.encode("1" * 20, add_special_tokens=False).ids)
        for _ in range(50):
            _allowed(state)
            state.accept(letters)

    with pytest.raises(InvalidRequest, match="stopped after"):
        go_on()
    assert not state.is_finished
    for broken in (lambda: state.accept(letters), lambda: _allowed(state), lambda: _allowed(state.fork())):
        with pytest.raises(InvalidRequest, match="stopped after"):
            broken()
    assert _allowed(other) >= {xs[0], 2}
    other.accept([*xs, 2])
    assert other.is_finished
    new = _state(compiler, regex, GrammarKind.REGEX)  # from the cache
    new.accept([*xs, 2])
    assert new.is_finished
