"""Byte-level decoding as a table: id → bytes. Concatenation and one lossy UTF-8 pass give the text of any sequence.

The byte ↔ character map is GPT-2's (Radford et al. 2019): printable Latin-1 stands for itself, the rest is shifted
to U+0100 and up. A token with a character outside the map (an added token) stands for its own UTF-8.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer


def byte_table(tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> tuple[bytes, ...] | None:
    """One entry per id up to the largest; `decoder` is that part of tokenizer.json. None when it is not byte-level."""
    if decoder is not None and decoder.get("type") == "Sequence" and len(decoder.get("decoders", ())) == 1:
        decoder = decoder["decoders"][0]
    if decoder is None or decoder.get("type") != "ByteLevel":
        return None
    by_char = _char_bytes()
    table = [b""] * (max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        known = [by_char.get(char) for char in token]
        table[token_id] = token.encode() if None in known else bytes(byte for byte in known if byte is not None)
    return tuple(table)


def _char_bytes() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(shifted)}
