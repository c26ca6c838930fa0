from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from common.errors import InternalError, InvalidRequest, Overloaded, UnsupportedValue
from common.grammar import LENIENT, Grammar, GrammarKind
from engine.grammar import compiler as compiler_module
from engine.grammar.compiled_grammar import CompiledGrammar
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.state import GrammarState

VOCAB = 49152
ENDS = frozenset((0, 2))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> GrammarCompiler:
    return GrammarCompiler(smollm2, VOCAB, ENDS)


def _grammar(kind: GrammarKind, text: Any) -> Grammar:
    return Grammar(kind, text if isinstance(text, str) else json.dumps(text))


def _takes(state: GrammarState, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the whole output may be `text`, as an end token after it says."""
    try:
        state.accept([*tokenizer.encode(text, add_special_tokens=False).ids, 2])
    except InvalidRequest:
        return False
    return state.is_finished


@pytest.mark.parametrize(("kind", "text", "good", "bad"), [
    (GrammarKind.REGEX, r"\d{3}-\d{4}", ["555-1234"], ["555-123", "a555-1234", "555-12345"]),
    (GrammarKind.REGEX, "^abc$", ["abc"], ["ab", "abcd"]),
    (GrammarKind.REGEX, "a/b\nc|", ["a/b\nc", ""], ["a/b"]),
    (GrammarKind.LARK, 'start: "(" start ")" | "x"', ["x", "((x))"], ["((x)", ")x("]),
    (GrammarKind.LARK, 'start: "v=" %json {"type": "integer"}', ["v=17"], ["v=x", "17"]),
    (GrammarKind.CHOICE, ["yes", "no", "no way", 'q"\\\n', "é😀"], ["yes", "no", "no way", 'q"\\\n', "é😀"],
     ["", "nope", "no w"]),
    (GrammarKind.JSON_SCHEMA, {"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"},
     ['{"a": 1}', '{"a": 1, "b": [true, null]}'], ['{"a":1}', '{"a": "1"}', "{}", '{"a": 1} ']),
    (GrammarKind.JSON_SCHEMA, {}, ["{}", "[1, 2]", '"x"', "-1.5e3", "null"], ["", "{", "[1,]", "nul"]),
    (GrammarKind.JSON_SCHEMA, True, ["3"], ["x"]),
])
def test_the_whole_output_has_to_match(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind: GrammarKind, text: Any, good: list[str], bad: list[str]
) -> None:
    grammar = _grammar(kind, text)
    assert [case for case in good if not _takes(compiler.compile(grammar), tokenizer, case)] == []
    assert [case for case in bad if _takes(compiler.compile(grammar), tokenizer, case)] == []


@pytest.mark.parametrize(("kind", "text", "reason"), [
    (GrammarKind.JSON_SCHEMA, {"type": "strng"}, "unknown type 'strng'"),
    (GrammarKind.JSON_SCHEMA, {"properties": {"a": {"type": "strng"}}}, "/properties/a/type"),
    (GrammarKind.JSON_SCHEMA, '{"a":', "not JSON"),
    (GrammarKind.JSON_SCHEMA, '{"minimum": NaN}', "NaN"),
    (GrammarKind.JSON_SCHEMA, [], "must be an object or a boolean, got an array"),
    (GrammarKind.JSON_SCHEMA, False, "no value is valid"),
    (GrammarKind.JSON_SCHEMA, {"$ref": "#"}, "no text can go on"),
    (GrammarKind.JSON_SCHEMA, {"$ref": "https://example.com/s.json"}, "example.com"),
    (GrammarKind.JSON_SCHEMA, {"type": "string", "format": "idn-email"}, "idn-email"),
    (GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "["}, "unclosed"),
    (GrammarKind.JSON_SCHEMA, {"type": "integer", "minimum": 3, "maximum": 2}, "greater than"),
    (GrammarKind.REGEX, "[a-", "unclosed character class"),
    (GrammarKind.REGEX, "(", "unclosed group"),
    (GrammarKind.REGEX, r"(a)\1", "backreferences"),
    (GrammarKind.REGEX, "(?=a)b", "look-around"),
    (GrammarKind.REGEX, r"[^\s\S]", "no text can go on"),
    (GrammarKind.LARK, "start: other", "other"),
    (GrammarKind.LARK, "", "Empty"),
    (GrammarKind.LARK, 'start: %json {"type": "object", "odd": 1}', "'odd'"),
    (GrammarKind.LARK, "start: <[999999]>", "999999"),
    (GrammarKind.CHOICE, "x", "not JSON"),
    (GrammarKind.CHOICE, [], "1 to 1000"),
    (GrammarKind.CHOICE, ["a", ""], "not empty"),
    (GrammarKind.CHOICE, [1], "strings"),
])
def test_what_does_not_work_is_refused_with_its_reason(
    compiler: GrammarCompiler, kind: GrammarKind, text: Any, reason: str
) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(InvalidRequest) as refusal:
            compiler.compile(_grammar(kind, text))
        assert refusal.value.param == "grammar"
        assert reason in refusal.value.message


@pytest.mark.parametrize("schema", [
    {"type": "object", "propertyNames": {"type": "string"}}, {"type": "array", "uniqueItems": False},
    {"type": "string", "nullable": False}, {"type": "object", "unevaluatedProperties": True},
    {"type": "string", "format": "binary"}, {"type": "string", "format": "password"}, {"properties": {"a": {
        "deprecated": True, "readOnly": True, "writeOnly": True, "examples": [1], "$comment": "c", "format": "path"}}}])
def test_a_keyword_that_asks_for_nothing_is_taken(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    good = {"object": "{}", "array": "[]", "string": '"a"'}[schema.get("type", "object")]
    inside = _grammar(GrammarKind.LARK, f"start: %json {json.dumps(schema)} /x/")
    for grammar, end in ((_grammar(GrammarKind.JSON_SCHEMA, schema), ""), (inside, "x")):
        assert _takes(compiler.compile(grammar), tokenizer, good + end)
        assert not _takes(compiler.compile(grammar), tokenizer, "}" + end)


@pytest.mark.parametrize(("part", "value"), [
    ({"type": "string", "pattern": "^(?!a)"}, "ab"), ({"type": "string", "pattern": "(x{1000}){1000}"}, "ab"),
    ({"type": "string", "format": "idn-email"}, "ab"), ({"type": "array", "uniqueItems": True}, [1, 1]),
    ({"type": "object", "minProperties": 3}, {}), ({"type": "integer", "not": {"const": 3}}, 3),
    ({"type": "string", "nullable": True}, None),
    ({"type": "object", "patternProperties": {"^(?=a)": {"type": "null"}}, "additionalProperties": False}, {"a": 1}),
    ({"oneOf": [{"type": "string", "pattern": "^(?!a)"}, {"type": "string", "title": "any"}]}, "ab")])
def test_a_lenient_part_of_a_schema_is_enforced_as_far_as_it_can_be(
    compiler: GrammarCompiler, tokenizer: Tokenizer, part: dict[str, Any], value: Any
) -> None:
    lenient = {"properties": {"a": part, "b": {"type": "integer"}}, "type": "object", "required": ["a", "b"]}
    grammar = _grammar(GrammarKind.JSON_SCHEMA, {**lenient, LENIENT: True})
    assert _takes(compiler.compile(grammar), tokenizer, json.dumps({"a": value, "b": 1}))
    assert not _takes(compiler.compile(grammar), tokenizer, json.dumps({"a": value, "b": "x"}))
    beside = {"type": "object", "properties": {"x": {LENIENT: True}, "y": lenient}, "required": ["y"]}
    for insisting in ({**lenient, LENIENT: False}, beside):
        with pytest.raises(InvalidRequest):
            compiler.compile(_grammar(GrammarKind.JSON_SCHEMA, insisting))


@pytest.mark.parametrize("schema", [
    {"not": {}}, {"if": {}}, {"type": "array", "uniqueItems": True}, {"type": "array", "contains": {}},
    {"propertyNames": {}}, {"dependentRequired": {}}, {"unevaluatedProperties": False}, {"nullable": True},
    {"x-guidance": {"lenient": True}}, {"typo": 1}, {"minProperties": 3},
    {"anyOf": [{"type": "integer"}, {"properties": {"deep": {"items": {"$dynamicRef": "#x"}}}}]}])
def test_a_keyword_that_is_not_enforced_is_refused_by_name(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    keyword = next(word for word in ("$dynamicRef", *schema) if word in json.dumps(schema) and word != "type")
    with pytest.raises(UnsupportedValue, match=f"{keyword.replace('$', '[$]')}'"):
        compiler.compile(_grammar(GrammarKind.JSON_SCHEMA, schema))


def test_annotations_and_extensions_are_let_through(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"title": "t", "description": "d", "default": 1, "examples": [2], "$comment": "c", "x-order": 3,
              "deprecated": True, "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "integer"}
    assert _takes(compiler.compile(_grammar(GrammarKind.JSON_SCHEMA, schema)), tokenizer, "5")


def _chain(length: int, step: str) -> str:
    defs = {f"a{i}": json.loads(step.replace("NEXT", f'{{"$ref": "#/$defs/a{i + 1}"}}')) for i in range(length)}
    return json.dumps({"$defs": {**defs, f"a{length}": {"type": "null"}}, "$ref": "#/$defs/a0"})


BOMBS = {
    "repeats of repeats": (GrammarKind.REGEX, "(a{1000}){1000}"),
    "three repeats": (GrammarKind.REGEX, "a{100}{100}{100}"),
    "a long regex": (GrammarKind.REGEX, "ab" * 20_000),
    "deep groups": (GrammarKind.REGEX, "(" * 15_000 + "a" + ")" * 15_000),
    "a pattern bomb": (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "((a{99}){99}){99}"}'),
    "deep arrays": (GrammarKind.JSON_SCHEMA, '{"items":' * 20_000 + "{}" + "}" * 20_000),
    "depth 100": (GrammarKind.JSON_SCHEMA, '{"items":' * 100 + "{}" + "}" * 100),
    "a chain of refs": (GrammarKind.JSON_SCHEMA, _chain(3000, '{"allOf": [NEXT, {"type": ["null", "string"]}]}')),
    "no end": (GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
    "many optional properties": (GrammarKind.JSON_SCHEMA, json.dumps(
        {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}})),
    "a large enum": (GrammarKind.JSON_SCHEMA, json.dumps({"enum": list(range(25_000))})),
    "a product of choices": (GrammarKind.JSON_SCHEMA, json.dumps({"allOf": [
        {"anyOf": [{"properties": {f"k{i}{j}": {"type": "string"}}} for j in range(5)]} for i in range(9)]})),
    "a large multiple": (GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 999999937}'),
    "deep brackets": (GrammarKind.LARK, "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "a chain of rules": (GrammarKind.LARK, "start: r0\n" + "".join(
        f"r{i}: r{i + 1}\n" for i in range(9000)) + 'r9000: "a"'),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_end_within_the_limit_with_an_error(compiler: GrammarCompiler, bomb: str) -> None:
    with pytest.raises(InvalidRequest):
        compiler.compile(_grammar(*BOMBS[bomb]))


@pytest.mark.parametrize("text", [
    _chain(1000, '{"allOf": [NEXT, {"type": ["null", "string"]}]}'), _chain(60, '{"anyOf": [NEXT, NEXT]}'),
    json.dumps({"enum": [f"item {i}" for i in range(10_000)]})])
def test_what_is_just_within_the_limits_compiles(compiler: GrammarCompiler, text: str) -> None:
    assert not compiler.compile(_grammar(GrammarKind.JSON_SCHEMA, text)).is_finished


def test_a_model_without_a_tokenizer_refuses_by_name(tmp_path: Path) -> None:
    for content in (None, "{}", "no json"):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UnsupportedValue, match="tokenizer"):
            GrammarCompiler(tmp_path, VOCAB, ENDS).compile(Grammar(GrammarKind.REGEX, "a"))


def test_a_vocabulary_larger_than_the_tokenizers_is_filled_up_with_tokens_that_are_never_allowed(smollm2: Path) -> None:
    state = GrammarCompiler(smollm2, VOCAB + 100, ENDS).compile(Grammar(GrammarKind.REGEX, "(?s:.*)"))
    words = np.empty(-(-(VOCAB + 100) // 32), np.uint32)
    state.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert bits[:VOCAB].sum() > 40_000
    assert not bits[VOCAB:].any()


def test_a_grammar_is_compiled_once_for_all_who_ask_and_each_gets_a_state_of_its_own(
    smollm2: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, num_compiled = GrammarCompiler(smollm2, VOCAB, ENDS, max_cached=2), 0

    def counted(*args: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return CompiledGrammar(*args)

    monkeypatch.setattr(compiler_module, "CompiledGrammar", counted)
    grammars = [Grammar(GrammarKind.REGEX, f"a{i}b") for i in range(3)]
    with ThreadPoolExecutor(8) as pool:
        states = list(pool.map(compiler.compile, [grammars[0]] * 16))
    assert num_compiled == 1
    assert _takes(states[0], tokenizer, "a0b")
    assert not states[1].is_finished
    for grammar in (*grammars[1:], grammars[2], grammars[0]):  # the first has been dropped
        compiler.compile(grammar)
    assert num_compiled == 4


def test_a_compilation_that_takes_too_long_is_given_up_and_others_are_told_to_come_back(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(smollm2, VOCAB, ENDS, num_threads=1, time_limit_s=0.2)
    compiler.compile(Grammar(GrammarKind.REGEX, "first"))
    go_on = threading.Event()

    def slow(*args: Any) -> Any:
        go_on.wait(20)
        return CompiledGrammar(*args)

    monkeypatch.setattr(compiler_module, "CompiledGrammar", slow)
    with pytest.raises(InvalidRequest, match=r"within 0\.2 s"):
        compiler.compile(Grammar(GrammarKind.REGEX, "slow"))
    with pytest.raises(Overloaded):
        compiler.compile(Grammar(GrammarKind.REGEX, "other"))
    compiler.compile(Grammar(GrammarKind.REGEX, "first"))  # cached: undisturbed
    go_on.set()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            compiler.compile(Grammar(GrammarKind.REGEX, "slow"))
        except InvalidRequest:
            continue
        return
    pytest.fail("what was compiled too late was not kept")


def test_a_thread_that_does_not_start_costs_no_later_compilation_its_place(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(smollm2, VOCAB, ENDS, num_threads=1, time_limit_s=5.0)

    def fails(run: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(compiler_module, "_start_thread", fails)
        for _ in range(2):
            with pytest.raises(Overloaded, match="can't start new thread") as caught:
                compiler.compile(Grammar(GrammarKind.REGEX, "a"))
            assert caught.value.retry_after_s
    assert not compiler.compile(Grammar(GrammarKind.REGEX, "a")).is_finished


def test_a_fault_of_the_compiler_is_not_remembered_but_a_refusal_is(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, good, wrong = (
        GrammarCompiler(smollm2, VOCAB, ENDS), Grammar(GrammarKind.REGEX, "a"), Grammar(GrammarKind.REGEX, "("))

    def fails(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(compiler_module, "CompiledGrammar", fails)
        with pytest.raises(InternalError, match="MemoryError"):
            compiler.compile(good)
    assert not compiler.compile(good).is_finished
    with pytest.raises(InvalidRequest):
        compiler.compile(wrong)
    monkeypatch.setattr(compiler_module, "CompiledGrammar", fails)
    with pytest.raises(InvalidRequest, match="unclosed group"):
        compiler.compile(wrong)


def test_ready_gives_only_what_needs_no_compilation(smollm2: Path, tokenizer: Tokenizer) -> None:
    compiler, grammar = GrammarCompiler(smollm2, VOCAB, ENDS), Grammar(GrammarKind.REGEX, "ab")
    assert compiler.ready(grammar) is None
    compiler.compile(grammar)
    state = compiler.ready(grammar)
    assert state is not None
    assert _takes(state, tokenizer, "ab")
    compiler._cache[grammar].result()._renewed()  # as after a state that reached a limit
    assert compiler.ready(grammar) is None
    compiler.compile(grammar)
    assert compiler.ready(grammar) is not None
    with pytest.raises(InvalidRequest):
        compiler.compile(Grammar(GrammarKind.REGEX, "("))
    with pytest.raises(InvalidRequest):
        compiler.ready(Grammar(GrammarKind.REGEX, "("))
