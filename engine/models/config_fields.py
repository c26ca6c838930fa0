"""The fields of a `config.json`, read one by one; what nobody reads and may change the result is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard, TypeVar

from common.errors import ModelLoadError
from engine.models.parts import Sizes

T = TypeVar("T")

# Fields of Hugging Face configs that the forward pass of a trained model does not depend on.
_HARMLESS = frozenset({
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "cache_implementation", "dtype", "eos_token_id",
    "id2label", "initializer_range", "is_llama_config", "label2id", "max_window_layers",
    "model_type", "pad_token_id", "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id",
    "use_cache", "hidden_dropout", "embedding_dropout", "resid_pdrop", "embd_pdrop", "decoder_start_token_id",
    # of older files: settings of `generate`, which a request or generation_config.json says
    "begin_suppress_tokens", "chunk_size_feed_forward", "diversity_penalty", "do_sample", "early_stopping",
    "length_penalty", "max_length", "min_length", "num_beam_groups", "num_beams", "num_return_sequences",
    "repetition_penalty", "return_dict", "temperature", "top_k", "top_p", "typical_p", "sep_token_id", "prefix",
})


class ConfigFields:
    """Read once, by one architecture. Every refusal is a `ModelLoadError` that names the field as `where` + name."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self._raw = raw
        self._where = where
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Is there, and not null."""
        return self._raw.get(name) is not None

    def value(self, name: str) -> Any:
        """As it is in the file, or None."""
        self._read.add(name)
        return self._raw.get(name)

    def size(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1; a `default` of None means that the field must be there."""
        value = self.value(name)
        value = default if value is None else value
        if not is_int(value) or value < 1:
            self.refuse(name, "is missing" if value is None else f"must be an integer of at least 1, got {value!r}")
        return value

    def optional_size(self, name: str, default: int | None) -> int | None:
        """A null in the file means None; `default` stands for a field that is absent."""
        if name in self._raw and self.value(name) is None:
            return None
        return None if name not in self and default is None else self.size(name, default)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.value(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            self.refuse(name, "is missing" if value is None else f"must be a number above 0, got {value!r}")
        return float(value)

    def optional_positive(self, name: str) -> float | None:
        return self.positive(name) if self.value(name) is not None else None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, f"must be true or false, got {value!r}")
        return default if value is None else bool(value)

    def choice(self, name: str, supported: Mapping[str, T], default: str) -> T:
        value = self.value(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in supported:
            self.refuse(name, f"must be one of {', '.join(supported)}, got {value!r}")
        return supported[value]

    def only(self, name: str, supported: object) -> None:
        """The field may be absent or null, or have exactly this value."""
        value = self.value(name)
        if value is not None and value != supported:
            self.refuse(name, f"only {supported!r} is supported, got {value!r}")

    def section(self, name: str) -> ConfigFields | None:
        """The object under `name`, whose own fields are refused by their dotted name."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, f"must be an object, got {value!r}")
        return ConfigFields(value, f"{self._where}{name}.")

    def sizes(self, **defaults: int) -> Sizes:
        """Those of the model by their usual names; `defaults` are the architecture's for fields that are absent."""
        heads, hidden = self._known("num_attention_heads", defaults), self._known("hidden_size", defaults)
        sizes = Sizes(
            vocab=self._known("vocab_size", defaults), hidden=hidden,
            intermediate=self._known("intermediate_size", defaults),
            num_layers=self._known("num_hidden_layers", defaults), num_heads=heads,
            num_kv_heads=self.size("num_key_value_heads", defaults.get("num_key_value_heads", heads)),
            head_dim=self.size("head_dim", defaults.get("head_dim", max(1, hidden // heads))),
            context=self.size("max_position_embeddings", defaults.get("max_position_embeddings", 2048)))
        if heads % sizes.num_kv_heads:
            self.refuse("num_attention_heads", f"{heads} is not a multiple of num_key_value_heads "
                                               f"({sizes.num_kv_heads})")
        if sizes.head_dim % 2:
            self.refuse("head_dim", f"must be even for rotary positions, got {sizes.head_dim}")
        return sizes

    def refuse_unread(self) -> None:
        """Raise for a field that no part has read, unless it is known to be harmless or says null or false (off)."""
        for name, value in self._raw.items():
            is_off = value is None or value is False
            if not is_off and name not in self._read and name not in _HARMLESS and not name.startswith("_"):
                self.refuse(name, f"is not supported for this architecture, got {value!r}")

    def refuse(self, name: str, why: str) -> NoReturn:
        raise ModelLoadError(f"model config: {self._where}{name}: {why}", param=f"{self._where}{name}")

    def _known(self, name: str, defaults: Mapping[str, int]) -> int:
        return self.size(name, defaults.get(name))


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
