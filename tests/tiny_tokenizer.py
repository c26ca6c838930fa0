"""A byte-level BPE tokenizer for models of 256 ids, so that their output can be constrained."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_TEXTS = (
    '{"name": "abc", "count": 12, "tags": ["red", "green"], "colour": null, "is_open": true}',
    "the quick brown fox jumps over the lazy dog", "a plan is made and a row is computed")


def tiny_tokenizer(folder: Path) -> Tokenizer:
    """Write tokenizer.json: printable ASCII, some longer tokens; ids 0, 1, 2 are padding, start and end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(_TEXTS * 50, trainers.BpeTrainer(
        vocab_size=256, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=[*map(chr, range(33, 127)), "Ġ"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
