"""EBNF becomes a grammar of the same language, as the engine's own compiler reads it, or a refusal with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from engine.grammar.compiler import GrammarCompiler
from gateway.ebnf import MAX_DEPTH, MAX_EBNF_CHARS, is_ebnf, lark_of
from tests.tiny_tokenizer import tiny_tokenizer

END = 2
JSON = r'''
# as in llama.cpp's examples
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
'''


class Language:
    """Which outputs a grammar lets through, by the compiler that workers use."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = tiny_tokenizer(folder)
        self._compiler = GrammarCompiler(folder, 256, frozenset({END}))

    def takes(self, ebnf: str, text: str) -> bool:
        state = self._compiler.compile(Grammar(GrammarKind.LARK, lark_of(ebnf)))
        try:
            state.accept([*self._tokenizer.encode(text, add_special_tokens=False).ids, END])
        except InvalidRequest:
            return False
        return state.is_finished


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Language:
    return Language(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("ebnf", "good", "bad"), [
    ('root ::= "yes" | "no"', ["yes", "no"], ["", "yesno", "y"]),
    ('root ::= [a-c]* "b"', ["b", "aab", "cbb"], ["", "abc", "d"]),
    ('root ::= a-1 | ("x")?  # a comment\na-1 ::= "q"{2,3} [^"]{0,}', ["", "x", "qq", "qqqz", "qq/]"], ["q", 'qq"']),
    ('root ::= "a"{0} "b"{0,} "c"{0,0}', ["", "b", "bb"], ["a", "c"]),
    ('root ::=\n  "a"\n  | # nothing\n', ["a", ""], ["b"]),
    ('root ::= x{2} y{2,}\nx ::= [0-9]\ny ::= "" | "z"', ["12", "12zzz"], ["1z", "123"]),
    ('root ::= . [.] [\\]\\-] [+-] [\\x41-\\u0043] "\\u0041\\"/"', ['?.]+BA"/', '/.--CA"/'], ['?x]+BA"/', '?.[+BA"/']),
    ('root ::= "x" | [ab]* "b" "(" root ")"', ["x", "b(x)", "aab(bb(x))"], ["a(x)", "(x)", "b(x"]),
    ("root ::= [a\\-c] [-a] [a-]", ["a--", "-a-", "caa"], ["b--", "a-b"]),
    ('root ::= ws v ws\nv ::= "[" ws v ws "]" | ws\nws ::= " "*', ["", "  ", "[ [  ] ] "], ["[", "] ["]),
    ('root ::= sum\nsum ::= term (ws "+" ws term)*\nterm ::= [0-9]+ | "(" sum ")"\nws ::= " "*',
     ["1", "1 + 22", "(1+ (2 + 3))+4"], ["(1", "1 +", "+", "1 1"]),
    ('root ::= "(" root " "? root ")" | "" | "x"', ["", "x", "(x x)", "( )", "(x(xx))"], ["(", "(x", "x x"]),
    (JSON, ['{}', '{"a": [1, -2.5e3, {"b": "x\\n\\u00e9"}], "c": null }'], ['{"a"}', "[]", '{"a": 1,}', '{"a": 01}']),
])
def test_the_language_is_the_same(language: Language, ebnf: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not language.takes(ebnf, text)] == []
    assert [text for text in bad if language.takes(ebnf, text)] == []


# The same expression as EBNF and as a regular expression of Python.
_TWINS = st.recursive(
    st.sampled_from([
        ('"a"', "a"), ('"ab"', "ab"), ("[ab]", "[ab]"), ("[^b]", "[^b]"), ('""', "(?:)"), (".", "(?s:.)")]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: (
            f"({' '.join(p[0] for p in parts)})", "".join(f"(?:{p[1]})" for p in parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: (
            f"({' | '.join(p[0] for p in parts)})", "|".join(f"(?:{p[1]})" for p in parts))),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,1}"])).map(
            lambda pair: (f"({pair[0][0]}){pair[1]}", f"(?:{pair[0][1]}){pair[1]}"))),
    max_leaves=6)


@settings(max_examples=60, deadline=None)
@given(_TWINS, st.lists(st.text("abc", max_size=4), min_size=1, max_size=5))
def test_what_does_not_refer_to_itself_means_what_a_regex_means(
    language: Language, twin: tuple[str, str], texts: list[str]
) -> None:
    ebnf, regex = twin
    for rules in (f"root ::= {ebnf}", f"root ::= part\npart ::= {ebnf}"):
        for text in ["", *texts]:
            assert language.takes(rules, text) == bool(re.fullmatch(regex, text)), (rules, text)


@pytest.mark.parametrize(("ebnf", "reason"), [
    ("", "no rule named 'root'"), ('start ::= "a"', "no rule named 'root'"),
    ('root ::= "a"\nroot ::= "b"', "'root' is defined twice"), ("root ::= other", "'other', which is not defined"),
    ('root ::= TagDispatch("a")', "'TagDispatch', which is not defined"),
    ('root ::= "a"\n\n  "b', 'line 3: \'"b\' is not understood'), ("root ::= 'a'", "line 1: \"'a'\" is not understood"),
    ('root ::= "a" (="b")', "line 1: '=\"b\")' is not understood"), ("root ::= [a-", "line 1: '[a-' is not understood"),
    ("root ::= []", "line 1: '[]' is an empty set"), ("root ::= [z-a]", "line 1: the range 'z' to 'a' is empty"),
    (r'root ::= "\q"', r"line 1: the escape '\q' is not known"), (r"root ::= [\d]", r"the escape '\d' is not known"),
    (r'root ::= "\x4"', r"the escape '\x4' is not known"), (r'root ::= "\ud800"', r"'\ud800' is no character"),
    (r'root ::= "\U00110000"', "is no character"), ('root ::= ("a"', "line 1: a bracket is not closed"),
    ('root ::= "a")', "line 1: a rule `name ::= …` is expected"), ("root ::= *", "'*' has nothing to stand behind"),
    ('root ::= "a"{3,2}', "line 1: '{3,2}' is no number of times"),
    ('root ::= "a"+*', "'*' has nothing to stand behind"), ('"a"', "line 1: a rule"),
    (f'root ::= {"(" * (MAX_DEPTH + 1)}"a"{")" * (MAX_DEPTH + 1)}', f"more than {MAX_DEPTH} open brackets"),
    ("#" * (MAX_EBNF_CHARS + 1), f"the limit is {MAX_EBNF_CHARS}")], ids=lambda value: value[:30])
def test_what_is_not_understood_is_refused_with_its_line_and_what_it_is(ebnf: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        lark_of(ebnf)
    assert reason in refusal.value.message
    assert len(refusal.value.message) < 300


_SIGNS = ("root", "::=", "a", '"', "[", "]", "^", "-", "\\", "x", "(", ")", "|", "*", "{1,", "}", "#", "\n", " ")


@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from(_SIGNS)).map("".join))
def test_no_text_raises_anything_but_a_refusal(text: str) -> None:
    for ebnf in (text, f"root ::= {text}"):
        try:
            said = lark_of(ebnf)
        except InvalidRequest as refusal:
            said = refusal.message
        assert said.startswith(("start", "EBNF")), said


def test_a_long_chain_of_rules_is_no_deep_recursion() -> None:
    chain = "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(3000)) + '\nr3000 ::= "a"'
    assert lark_of(chain).count("\n") == 3004
    looped = chain.replace('r3000 ::= "a"', 'r3000 ::= "a" | root')
    assert lark_of(looped).startswith("start: r0")


def test_only_rules_defined_by_their_own_sign_are_ebnf() -> None:
    assert is_ebnf("root ::= x")
    assert not is_ebnf('start: "a"')
