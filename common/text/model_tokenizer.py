"""A model's tokenizer, from its folder, on the `tokenizers` library alone. Immutable; safe from threads."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.errors import InvalidRequest, ModelLoadError
from common.text.byte_table import byte_table
from common.text.segments import Segmenter, find_segmenter, is_piecewise


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """`vocab_size` is the model's (config.json): ids at the end that the tokenizer lacks are valid and have no text."""

    folder: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    special_tokens: Mapping[str, str]  # role -> token as text: bos_token, eos_token, pad_token, ...
    special_ids: frozenset[int]  # left out of text with skip_special_tokens
    token_bytes: tuple[bytes, ...] | None  # id -> its bytes, when decoding is byte-level; else None
    byte_tokens: frozenset[int]  # ids that stand for one raw byte (byte fallback); empty when there are none
    adds_special_tokens: bool  # whether encoding with `add_special_tokens` adds any
    is_piecewise: bool  # whether text between two added tokens is encoded by itself
    _tokenizer: Tokenizer

    @staticmethod
    def load(folder: Path | str) -> ModelTokenizer:
        """Read tokenizer.json and the configs beside it. Raises `ModelLoadError` naming the file at fault."""
        folder = Path(folder)
        tokenizer, raw = _read_tokenizer(folder)
        config = read_json(folder, "config.json")
        config = {**(config.get("text_config") or {}), **config}  # of a model with images: its text half
        generation = read_json(folder, "generation_config.json")
        special_tokens = _special_tokens(folder)
        known = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        return ModelTokenizer(
            folder=folder,
            vocab_size=_vocab_size(folder, config, known),
            eos_token_ids=_eos_ids(tokenizer, generation, config, special_tokens),
            bos_token_id=_bos_id(tokenizer, generation, config, special_tokens),
            special_tokens=special_tokens,
            special_ids=frozenset(i for i, token in added.items() if token.special),
            token_bytes=byte_table(tokenizer, raw.get("decoder")),
            byte_tokens=_byte_tokens(tokenizer),
            adds_special_tokens=tokenizer.num_special_tokens_to_add(False) > 0,
            is_piecewise=is_piecewise(raw),
            _tokenizer=tokenizer,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the whole text, never cut. Raises `InvalidRequest` for text that is not valid Unicode."""
        return self.encode_each([text], add_special_tokens=add_special_tokens)[0]

    def encode_each(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """As `encode`, of several texts, each by itself."""
        for text in texts:
            num_utf8_bytes(text)
        # The batch call, unlike `encode`, releases the GIL.
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        ids = [one.ids for one in encoded]
        for of_one in ids:
            self.check(of_one)
        return ids

    def segmenter(self, wanted: Collection[str]) -> Segmenter:
        """Cuts before those of the wanted special tokens where that is proved to leave all ids as they are."""
        return find_segmenter(self._tokenizer, wanted if self.is_piecewise else ())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of the whole sequence; bytes that are not valid UTF-8 become U+FFFD. Ids without a token add none."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary writes it; empty when there is none."""
        return self._tokenizer.id_to_token(token_id) or ""

    def bytes_of(self, token_id: int) -> bytes:
        """The token's own bytes, which may be part of a character; none where there is no token."""
        if self.token_bytes is not None:
            return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""
        written = self.token_string(token_id)
        if token_id in self.byte_tokens:
            return bytes((int(written[3:5], 16),))
        if not written:
            return b""
        first = self.decode((token_id,), skip_special_tokens=False)  # decoders trim what a text begins with
        return self.decode((token_id, token_id), skip_special_tokens=False)[len(first) :].encode()

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise `InvalidRequest` for an id outside `0 .. vocab_size - 1`."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise InvalidRequest(
                f"tokens: token id {wrong} is outside the vocabulary 0..{self.vocab_size - 1}", param="tokens")


def num_utf8_bytes(text: str) -> int:
    """Raises `InvalidRequest` for a lone surrogate, which UTF-8 cannot hold."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("prompt: holds a lone surrogate, which is not valid Unicode", param="prompt") from None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in `folder/name`; empty when there is no such file. Raises `ModelLoadError` when it is broken."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(loaded, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, holds a {type(loaded).__name__}")
    return loaded


def _read_tokenizer(folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{path}: no such file; the model folder must hold a tokenizer.json")
    raw = read_json(folder, "tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path}: not a tokenizer this library can load ({error})") from None
    tokenizer.no_truncation()  # a prompt is never cut silently
    tokenizer.no_padding()
    return tokenizer, raw


def _special_tokens(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for role, token in read_json(folder, name).items():
            text = token.get("content") if isinstance(token, dict) else token
            if role.endswith("_token") and isinstance(text, str):
                found[role] = text
    return found


def _vocab_size(folder: Path, config: dict[str, Any], known: int) -> int:
    size = config.get("vocab_size", known)
    if not isinstance(size, int) or size < 1:
        raise ModelLoadError(f"{folder / 'config.json'}: vocab_size must be a positive integer, got {size!r}")
    return size


def _eos_ids(
    tokenizer: Tokenizer, generation: dict[str, Any], config: dict[str, Any], special_tokens: dict[str, str]
) -> tuple[int, ...]:
    listed = _first_set("eos_token_id", generation, config)
    if listed is None and "eos_token" in special_tokens:
        listed = tokenizer.token_to_id(special_tokens["eos_token"])
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _bos_id(
    tokenizer: Tokenizer, generation: dict[str, Any], config: dict[str, Any], special_tokens: dict[str, str]
) -> int | None:
    listed = _first_set("bos_token_id", generation, config)
    if listed is None and "bos_token" in special_tokens:
        listed = tokenizer.token_to_id(special_tokens["bos_token"])
    return listed if isinstance(listed, int) else None


def _first_set(field: str, *objects: dict[str, Any]) -> Any:
    return next((o[field] for o in objects if o.get(field) is not None), None)


def _byte_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)
