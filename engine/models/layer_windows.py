"""Which layers see a sliding window only, as Hugging Face configs say it."""

from __future__ import annotations

from engine.models.config_fields import ConfigFields

_KINDS = ("full_attention", "sliding_attention")


def read_windows(fields: ConfigFields, num_layers: int, window: int | None, default: list[str]) -> list[int | None]:
    """The window of each layer: `window` where `layer_types` (absent: `default`) says sliding, else None."""
    kinds = fields.value("layer_types")
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        fields.refuse("layer_types", f"must be a list of num_hidden_layers ({num_layers}) names, got {kinds!r}")
    for kind in kinds:
        if kind not in _KINDS:
            fields.refuse("layer_types", f"each must be one of {', '.join(_KINDS)}, got {kind!r}")
    if window is None and "sliding_attention" in kinds:
        fields.refuse("sliding_window", "is missing or off, but layer_types has sliding_attention")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def from_layer(first: int, num_layers: int) -> list[str]:
    """Layer types where layers `first` and up slide."""
    return [_KINDS[i >= first] for i in range(num_layers)]


def every_nth_full(n: int, num_layers: int) -> list[str]:
    """Layer types where layers n - 1, 2n - 1, ... see all."""
    return [_KINDS[bool((i + 1) % n)] for i in range(num_layers)]
