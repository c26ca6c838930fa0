"""Small model folders for tests, trained on the spot: one per kind of decoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog", "日本語 日本 中文 🙂 🇩🇪 👨‍👩‍👧 é", "a b c d e f g h i j k l m n",
] * 4
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think now>"), AddedToken("ünïcode 🙂")])  # not special, not byte-level
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2: spaces as ▁, unknown characters as byte tokens, the first space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ("▁", "▁the", "▁fox", "a", "b", "c", "日", "é", "\ufffd", "."):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "</s>": 1, "▁": 2, "▁the": 3, "▁▁x": 4, "q": 5, "日": 6}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "##s": 4, "dog": 5, ".": 6, "'": 7, "don": 8, "t": 9}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def word_ends() -> Tokenizer:
    vocab = {"<unk>": 0, "</s>": 1, "lo": 2, "w</w>": 3, "er</w>": 4, "new</w>": 5}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def no_decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "one": 2, "two": 3, "three": 4}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def write_folder(
    folder: Path, make: Callable[[], Tokenizer] = byte_level, *, template: str = TEMPLATE, **config: Any
) -> Path:
    """A model folder with `make`'s tokenizer; `config` goes to config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1, **config}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder
