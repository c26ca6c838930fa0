"""What a model is, read from its Hugging Face folder: sizes, parts, context, ends. Torch-free.

What the forward pass does not compute is refused by name here, so that a model either runs right or not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelLoadError
from engine.models import ARCHITECTURES
from engine.models.config_fields import ConfigFields, is_int
from engine.models.parts import Decoder


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`num_layers`, `num_kv_heads` and `head_dim` are the one source of the KV cache's shape."""

    architecture: str
    decoder: Decoder  # what the forward pass computes
    eos_token_ids: frozenset[int]

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `config.json` and, where there is one, `generation_config.json`; raises `ModelLoadError`."""
        raw = _read_object(folder / "config.json")
        fields = ConfigFields(raw)
        names = fields.value("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
            fields.refuse("architectures", f"must be one of {', '.join(ARCHITECTURES)}, got {names!r}")
        decoder = ARCHITECTURES[names[0]](fields)
        config = cls(names[0], decoder, _eos_token_ids(folder, fields))
        fields.refuse_unread()
        return config

    @property
    def max_position_embeddings(self) -> int:
        """The context: tokens of prompt + output."""
        return self.decoder.sizes.context

    @property
    def vocab_size(self) -> int:
        return self.decoder.sizes.vocab

    @property
    def num_layers(self) -> int:
        return self.decoder.sizes.num_layers

    @property
    def num_heads(self) -> int:
        return self.decoder.sizes.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.decoder.sizes.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.decoder.sizes.head_dim


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}", param="model") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}", param="model") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(raw).__name__}", param="model")
    return raw


def _eos_token_ids(folder: Path, fields: ConfigFields) -> frozenset[int]:
    """What ends a generation: the generation config's word before the model config's, as transformers does it."""
    path = folder / "generation_config.json"
    value = _read_object(path).get("eos_token_id") if path.exists() else None
    value = fields.value("eos_token_id") if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_int(i) and i >= 0 for i in ids):
        fields.refuse("eos_token_id", f"must be a token id or a list of them, got {value!r}")
    return frozenset(ids)
