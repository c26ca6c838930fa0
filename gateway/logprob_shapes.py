"""Logprobs as the two endpoints write them. JSON has no infinity: -9999 stands for impossible."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from common.generation import TokenLogprobs
from common.tokenized import TokenText

LOWEST: Final = -9999.0

Texts = Mapping[int, TokenText]


def chat_entries(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], num_top: int, texts: Texts, *, as_ids: bool
) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat: one entry a token. A part of a character reads U+FFFD; `bytes` are exact."""
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = texts[token_id].raw
        token = f"token_id:{token_id}" if as_ids else raw.decode("utf-8", "replace")
        return {"token": token, "logprob": _finite(logprob), "bytes": list(raw)}

    return [{**entry(token_id, score.logprob), "top_logprobs": [
        entry(*top) for top in zip(score.top_token_ids[:num_top], score.top_logprobs, strict=False)]}
        for token_id, score in zip(token_ids, scores, strict=True)]


def prompt_entries(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None], num_top: int, texts: Texts
) -> Iterator[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM gives them: of each token its own and the likeliest by id; null for the first."""
    return (None if score is None else _ranked(token_id, score, num_top, texts)
            for token_id, score in zip(token_ids, scores, strict=True))


class CompletionLogprobs:
    """`logprobs` of one choice of a completion, part by part. Offsets are in characters of the whole text."""

    def __init__(self, num_top: int, *, skip_special_tokens: bool, as_ids: bool, num_chars: int = 0) -> None:
        """`num_chars` come before the text of the first token."""
        self._num_top, self._skip_special_tokens, self._as_ids = num_top, skip_special_tokens, as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begin = self._num_chars = num_chars
        self._space = _FirstSpace()

    def of(
        self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None], texts: Texts, text: str
    ) -> dict[str, Any]:
        """`text` is what the decoder gave out with these tokens."""
        self._space.see((texts[i].raw for i in token_ids if self._is_shown(texts[i])), text)
        return {
            "tokens": [self._name(i, texts) for i in token_ids],
            "token_logprobs": [None if score is None else _finite(score.logprob) for score in scores],
            "top_logprobs": [None if score is None else self._top(token_id, score, texts)
                             for token_id, score in zip(token_ids, scores, strict=True)],
            "text_offset": [self._pass(texts[i]) for i in token_ids]}

    def end(self) -> int:
        """How many characters there were. What follows is decoded by itself: a character left open ends here."""
        self._num_chars += len(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        return self._num_chars - self._space.num_dropped

    def _pass(self, text: TokenText) -> int:
        """Where the token begins; a part of a character begins where the character does."""
        begin = self._num_chars
        if self._is_shown(text):
            self._num_chars += len(self._decoder.decode(text.raw))
        return max(self._begin, begin - self._space.num_dropped)

    def _is_shown(self, text: TokenText) -> bool:
        return not (text.is_special and self._skip_special_tokens)

    def _top(self, token_id: int, score: TokenLogprobs, texts: Texts) -> dict[str, float]:
        """By the token's text, the likeliest of equal texts; the token itself is always there."""
        named: dict[str, float] = {}
        for top_id, logprob in zip(score.top_token_ids[: self._num_top], score.top_logprobs, strict=False):
            named.setdefault(self._name(top_id, texts), _finite(logprob))
        named.setdefault(self._name(token_id, texts), _finite(score.logprob))
        return named

    def _name(self, token_id: int, texts: Texts) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = texts[token_id].raw
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class _FirstSpace:
    """Whether the decoder dropped the space that the first token begins with, as for SentencePiece models.

    Text may come later than its tokens: known for sure once it has more than spaces.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._num_of_tokens = self._num_of_text = 0  # spaces they begin with
        self._tokens_begin = self._text_begins = True  # so far only spaces

    def see(self, tokens: Iterable[bytes], text: str) -> None:
        if not self._text_begins:
            return
        for raw in tokens if self._tokens_begin else ():
            rest = raw.lstrip(b" ")
            self._num_of_tokens += len(raw) - len(rest)
            if rest:
                self._tokens_begin = False
                break
        self._num_of_text += len(text) - len(text.lstrip(" "))
        self._text_begins = not text.strip(" ")
        if text:
            self.num_dropped = int(self._num_of_text < self._num_of_tokens)


def _ranked(token_id: int, score: TokenLogprobs, num_top: int, texts: Texts) -> dict[str, Any]:
    ranks = {top_id: rank for rank, top_id in enumerate(score.top_token_ids, 1)}
    logprobs = {token_id: score.logprob, **dict(zip(ranks, score.top_logprobs, strict=True))}
    named = dict.fromkeys((*score.top_token_ids[:num_top], token_id))
    return {str(i): {"logprob": _finite(logprobs[i]), "rank": ranks.get(i),
                     "decoded_token": texts[i].raw.decode("utf-8", "replace")} for i in named}


def _finite(logprob: float) -> float:
    return min(0.0, max(LOWEST, logprob))
