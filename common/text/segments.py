"""Where a text may be cut so that the ids of the pieces, joined, are the ids of the whole.

A tokenizer takes its added tokens out of the raw text first; what lies between two of them is normalized, split and
encoded by itself. So a text can be cut before an added token, if that token is always found there: before a *cut
token*. A segment is a cut token and all that follows up to the next one; the first segment may have none. The cut token
stays before its text, since some tokenizers treat the very start of a text in a way of its own.

Two proofs, both at load: the token's flags with the kinds of the tokenizer's parts, and sample texts that are encoded
whole and cut. Where either fails nothing is ever cut.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

_MAX_CUT_TOKENS: Final = 64
_PIECEWISE: Final = {  # parts of which each looks at one piece of text alone
    "normalizer": frozenset({
        "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
        "Replace", "Sequence", "Strip", "StripAccents"}),
    "pre_tokenizer": frozenset({
        "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation",
        "Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}),
    "model": frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"}),
}
_SAMPLES: Final = ("", " ", "\n", "a b", " the  end\n", "\tdon't 12345 ", "é日本 🙂", "Zürich.", "_x", "</", "▁")


class Segmenter:
    """Cuts before each of `cut_tokens`; without any it leaves every text whole. Immutable; safe from threads."""

    def __init__(self, cut_tokens: Sequence[str]) -> None:
        self.cut_tokens = tuple(cut_tokens)
        self._pattern = re.compile("|".join(map(re.escape, self.cut_tokens))) if self.cut_tokens else None

    def cut(self, text: str) -> list[str]:
        """The segments in order; joined they are the text. None of them is empty; an empty text has none."""
        starts = [match.start() for match in self._pattern.finditer(text)] if self._pattern is not None else []
        edges = [*(() if starts and starts[0] == 0 else (0,)), *starts, len(text)]
        return [text[begin:end] for begin, end in itertools.pairwise(edges) if end > begin]


def is_piecewise(raw: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json has known parts only, none of which looks beyond a piece or draws at random."""
    model = raw.get("model") or {}
    return not model.get("dropout") and all(
        kind in known for part, known in _PIECEWISE.items() for kind in _kinds(raw.get(part), part))


def find_segmenter(tokenizer: Tokenizer, wanted: Collection[str]) -> Segmenter:
    """A segmenter of those of the `wanted` tokens, and of 64 at most, that are proved to be cut tokens."""
    raw_tokens = [token for token in tokenizer.get_added_tokens_decoder().values()
                  if token.content and not token.normalized]
    found = [token.content for token in raw_tokens
             if token.content in wanted and _is_plain(token) and _is_always_found(token.content, raw_tokens)]
    segmenter = Segmenter(sorted(found)[:_MAX_CUT_TOKENS])
    return segmenter if _samples_agree(tokenizer, segmenter) else Segmenter(())


def _kinds(part: Any, name: str) -> Iterable[str]:
    """The kinds in one part of tokenizer.json, of a sequence those of its members too."""
    if part is None:
        return
    if not isinstance(part, dict):
        yield ""
        return
    # A model of an old file may not say its kind; it is BPE, then.
    yield str(part.get("type") or ("BPE" if name == "model" and "merges" in part else ""))
    for member in (*part.get("normalizers", ()), *part.get("pretokenizers", ())):
        yield from _kinds(member, name)


def _is_plain(token: AddedToken) -> bool:
    """It takes no white space before it, and begins with nothing that a token before it could look at or take."""
    first = token.content[0]
    return token.special and not token.lstrip and not token.single_word and not (
        first.isalnum() or first.isspace() or first == "_")


def _is_always_found(content: str, tokens: Iterable[AddedToken]) -> bool:
    """The leftmost token wins, of several the longest: no other one may begin before or with it and reach into it."""
    return not any(_can_hide(token.content, content) for token in tokens if token.content != content)


def _can_hide(other: str, content: str) -> bool:
    if content in other:
        return True
    return any(other.endswith(content[:length]) for length in range(1, min(len(other), len(content))))


def _samples_agree(tokenizer: Tokenizer, segmenter: Segmenter) -> bool:
    tokens = segmenter.cut_tokens
    texts = [left + token + right + after + left
             for token, after in zip(tokens, (*tokens[1:], *tokens[:1]), strict=True)
             for left, right in itertools.product(_SAMPLES, repeat=2)]
    return all(_ids(tokenizer, text) == [i for s in segmenter.cut(text) for i in _ids(tokenizer, s)] for text in texts)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
