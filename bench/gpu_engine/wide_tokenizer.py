"""A tokenizer of any number of tokens, for grammars over the vocabulary of a shape that has no files."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

_END = "<|end|>"


def write_wide_tokenizer(folder: Path, vocab_size: int) -> None:
    """`tokenizer.json` into `folder`: token 0 ends, then every byte, then random pieces of words, numbers and JSON."""
    draw = random.Random(0)
    pieces = dict.fromkeys([_END, *_byte_letters()])
    alphabets = (string.ascii_lowercase, string.ascii_letters, string.digits, '",:{}[] ', string.punctuation + " ")
    while len(pieces) < vocab_size:
        alphabet = draw.choices(alphabets, (60, 20, 8, 8, 4))[0]
        piece = draw.choice((" ", "")) + "".join(draw.choices(alphabet, k=draw.randint(2, 9)))
        pieces[piece.replace(" ", "Ġ")] = None
    described: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": 0, "content": _END, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "merges": [],
                  "vocab": {piece: index for index, piece in enumerate(pieces)}}}
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")


def _byte_letters() -> list[str]:
    """A printable letter for each byte, as byte-level BPE writes them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]
