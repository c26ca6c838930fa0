"""Rotary positions as a `config.json` says them: in `rope_parameters`, or in `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.models.config_fields import ConfigFields
from engine.models.parts import LinearScaling, Llama3Scaling, Rope, YarnScaling

_CONTEXT = 2048  # where config.json does not say
Scaling = LinearScaling | Llama3Scaling | YarnScaling | None


def read_rope(fields: ConfigFields, theta: float = 10000.0, *, interleaved: bool = False) -> Rope:
    """The rope of all layers; `theta` is the architecture's base for a file that names none."""
    fields.only("partial_rotary_factor", 1.0)
    section = rope_section(fields)
    theta = fields.positive("rope_theta", theta)
    return rope_of(section, fields, theta, interleaved=interleaved)


def rope_section(fields: ConfigFields) -> ConfigFields | None:
    """The one object that describes the rope, under either name; both at once must say the same."""
    old, new = fields.value("rope_scaling"), fields.value("rope_parameters")
    if old is not None and new is not None and old != new:
        fields.refuse("rope_scaling", f"differs from rope_parameters: {old!r} and {new!r}")
    return fields.section("rope_scaling" if old is not None else "rope_parameters")


def rope_of(section: ConfigFields | None, fields: ConfigFields, theta: float, *, interleaved: bool = False) -> Rope:
    """`section` {rope_type, rope_theta, ...}, where a missing base is `theta`; `fields` are those of the model."""
    if section is None:
        return Rope(theta, None, interleaved)
    kind = "rope_type" if "rope_type" in section else "type"
    read = section.choice(kind, _SCALINGS, "default")
    section.value("type")
    section.only("partial_rotary_factor", 1.0)
    theta = section.positive("rope_theta", theta)
    scaling = read(section, fields)
    section.refuse_unread()
    return Rope(theta, scaling, interleaved)


def _original_len(section: ConfigFields, fields: ConfigFields) -> int:
    return section.size("original_max_position_embeddings", fields.size("max_position_embeddings", _CONTEXT))


def _none(section: ConfigFields, fields: ConfigFields) -> Scaling:
    return None


def _linear(section: ConfigFields, fields: ConfigFields) -> Scaling:
    return LinearScaling(section.positive("factor"))


def _llama3(section: ConfigFields, fields: ConfigFields) -> Scaling:
    low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
    if high <= low:
        section.refuse("high_freq_factor", f"must be above low_freq_factor ({low}), got {high}")
    return Llama3Scaling(section.positive("factor"), low, high, _original_len(section, fields))


def _yarn(section: ConfigFields, fields: ConfigFields) -> Scaling:
    original_len = _original_len(section, fields)
    factor = section.positive("factor", fields.size("max_position_embeddings", _CONTEXT) / original_len)
    mscale, mscale_all = section.optional_positive("mscale"), section.optional_positive("mscale_all_dim")
    implied = _yarn_scale(factor, 1.0)
    if mscale is not None and mscale_all is not None:
        implied = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    return YarnScaling(
        factor, section.positive("attention_factor", implied), section.positive("beta_fast", 32.0),
        section.positive("beta_slow", 1.0), original_len, section.flag("truncate", True))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_SCALINGS: dict[str, Callable[[ConfigFields, ConfigFields], Scaling]] = {
    "default": _none, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
