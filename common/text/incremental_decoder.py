"""Token ids in, text out, a piece at a time.

For every id sequence and every way to cut it into pushes, the joined pieces equal the tokenizer's own decode of the
whole, byte for byte; what could still change is held back. States: open → (push)* → finished (by `finish`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Final, Protocol

from common.text.model_tokenizer import ModelTokenizer

_CONTEXT_TOKENS: Final = 4  # emitted tokens kept as left context; a decoder's leading-space rule needs one
_MAX_WINDOW_TOKENS: Final = 20
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class IncrementalDecoder(Protocol):
    """One stream of one choice."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that is certain after these tokens; may be empty."""

    def finish(self) -> str:
        """What was held back; an incomplete character becomes U+FFFD, as in the decode of the whole."""


def open_decoder(tokenizer: ModelTokenizer, *, skip_special_tokens: bool) -> IncrementalDecoder:
    """The fast path where the tokenizer is byte-level, else the one that is right for every decoder."""
    if tokenizer.token_bytes is not None:
        return ByteDecoder(
            tokenizer.token_bytes, tokenizer.special_ids if skip_special_tokens else frozenset())
    return WindowDecoder(tokenizer, skip_special_tokens=skip_special_tokens)


class ByteDecoder:
    """Byte-level tokenizers: bytes by table, then one incremental UTF-8 decoder. Holds back at most three bytes."""

    def __init__(self, token_bytes: tuple[bytes, ...], skipped: frozenset[int]) -> None:
        self._token_bytes, self._skipped = token_bytes, skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        table, skipped, size = self._token_bytes, self._skipped, len(self._token_bytes)
        return self._decode(b"".join([table[i] for i in token_ids if i not in skipped and i < size]))

    def finish(self) -> str:
        return self._decode(b"", final=True)


class WindowDecoder:
    """Any other decoder: decode a short window with and without the new tokens; the difference is the new text.

    The window is `[context | held]`: context tokens are out, held ones are not. Tokens without text are dropped
    first, so that the window always starts with one that had text. A run of byte tokens is held until it ends,
    because one wrong byte turns the whole run into U+FFFD. Other tokens that end in U+FFFD may end within a character:
    when the window is full, all text but the last U+FFFD goes out. (Window decoding as in text-generation-inference.)
    """

    def __init__(self, tokenizer: ModelTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        self._context_text = ""

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._push_one(i) for i in token_ids if i not in self._skipped])

    def finish(self) -> str:
        return self._release(self._decode(self._window))

    def _push_one(self, token_id: int) -> str:
        if not self._tokenizer.token_string(token_id):
            return ""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_tokens:
            return ""
        text = self._decode(self._window)
        num_open = int(text.endswith(_REPLACEMENT))  # a character that lacks bytes reads as one U+FFFD
        if num_open or not text.startswith(self._context_text):
            return self._release(text, num_open) if len(self._window) >= _MAX_WINDOW_TOKENS else ""
        return self._release(text)

    def _release(self, text: str, num_open: int = 0) -> str:
        """All new text but the last `num_open` characters, at most one; it has at most as many tokens as bytes."""
        new = text[len(self._context_text) : len(text) - num_open]
        self._window = self._window[-(2 if num_open else 1) * _CONTEXT_TOKENS :]
        known = self._decode(self._window)
        self._context_text = known[: len(known) - num_open]
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
