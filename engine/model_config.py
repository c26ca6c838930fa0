"""The shape of a model, read from the `config.json` of its Hugging Face folder. Torch-free.

What the forward pass does not compute is refused by name here, so that a model either runs right or not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from common.errors import ModelLoadError

ARCHITECTURE = "LlamaForCausalLM"

# Fields whose only computed value is this one (or absent, or null).
_FIXED: dict[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Validated: all sizes at least 1, `num_heads` a multiple of `num_kv_heads`, `head_dim` even."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # the context: tokens of prompt + output
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `config.json` and, where there is one, `generation_config.json`; raises `ModelLoadError`."""
        raw = _read_object(folder / "config.json")
        _refuse_unsupported(raw)
        heads = _size(raw, "num_attention_heads")
        hidden = _size(raw, "hidden_size")
        config = cls(
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=_size(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_size(raw, "num_key_value_heads", heads),
            head_dim=_size(raw, "head_dim", hidden // heads),
            max_position_embeddings=_size(raw, "max_position_embeddings", 2048),
            rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(raw),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            eos_token_ids=_eos_token_ids(folder, raw),
        )
        config._check_heads()
        return config

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise _refusal("num_attention_heads", f"{self.num_heads} is not a multiple of num_key_value_heads "
                                                  f"({self.num_kv_heads})")
        if self.head_dim % 2:
            raise _refusal("head_dim", f"must be even for rotary positions, got {self.head_dim}")


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


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("architectures") != [ARCHITECTURE]:
        raise _refusal("architectures", f"only [{ARCHITECTURE!r}] is supported, got {raw.get('architectures')!r}")
    for name, only in _FIXED.items():
        value = raw.get(name)
        if value is not None and value != only:
            wanted = "only models without it are supported" if only is None else f"only {only!r} is supported"
            raise _refusal(name, f"{wanted}, got {value!r}")


def _rope_theta(raw: dict[str, Any]) -> float:
    """The base frequency: at the top level in older files, in `rope_parameters` in newer ones."""
    for name in ("rope_scaling", "rope_parameters"):
        section = raw.get(name)
        if section is None:
            continue
        if not isinstance(section, dict):
            raise _refusal(name, f"must be an object, got {section!r}")
        kind = section.get("rope_type", section.get("type", "default"))
        if kind != "default":
            raise _refusal(name, f"only rope_type 'default' is supported, got {kind!r}")
        if section.get("partial_rotary_factor", 1.0) != 1.0:
            raise _refusal(f"{name}.partial_rotary_factor", "only 1.0 is supported")
    parameters = raw.get("rope_parameters") or {}
    return _positive(parameters if "rope_theta" in parameters else raw, "rope_theta", 10000.0)


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> frozenset[int]:
    """What ends a generation: the generation config's word before the model config's, as transformers does it."""
    path = folder / "generation_config.json"
    value = _read_object(path).get("eos_token_id") if path.exists() else None
    value = raw.get("eos_token_id") if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_int(i) and i >= 0 for i in ids):
        raise _refusal("eos_token_id", f"must be a token id or a list of them, got {value!r}")
    return frozenset(ids)


def _size(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if not _is_int(value) or value < 1:
        raise _refusal(name, "is missing" if value is None else f"must be an integer of at least 1, got {value!r}")
    return value


def _positive(raw: dict[str, Any], name: str, default: float) -> float:
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise _refusal(name, f"must be a number above 0, got {value!r}")
    return float(value)


def _flag(raw: dict[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise _refusal(name, f"must be true or false, got {value!r}")
    return bool(value)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _refusal(name: str, why: str) -> ModelLoadError:
    return ModelLoadError(f"model config: {name}: {why}", param=name)
