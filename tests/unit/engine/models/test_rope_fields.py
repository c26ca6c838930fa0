from __future__ import annotations

from typing import Any

import pytest

from common.errors import ModelLoadError
from engine.models.config_fields import ConfigFields
from engine.models.parts import LinearScaling, Rope, YarnScaling
from engine.models.rope_fields import read_rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _rope(**raw: Any) -> Rope:
    return read_rope(ConfigFields({"max_position_embeddings": 512, **raw}))


def test_the_base_is_found_at_the_top_or_in_the_section_or_is_the_default() -> None:
    assert _rope() == Rope(10000.0)
    assert _rope(rope_theta=5.0).theta == 5.0
    assert _rope(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).theta == 7.0
    assert _rope(rope_theta=5.0, rope_scaling={"rope_type": "default"}).theta == 5.0


def test_older_files_name_the_kind_type() -> None:
    assert _rope(rope_scaling={"type": "linear", "factor": 2}).scaling == LinearScaling(2.0)


def test_yarn_fills_in_what_the_paper_recommends() -> None:
    scaling = _rope(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 128}).scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (4.0, 32.0, 1.0, True)
    assert scaling.attention_factor == pytest.approx(1.1386294)


@pytest.mark.parametrize(("section", "name"), [
    ({"rope_type": "dynamic", "factor": 2.0}, "rope_type"),
    ({"type": "su"}, "type"),
    ({"rope_type": "linear"}, "factor"),
    ({"rope_type": "linear", "factor": 0}, "factor"),
    ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor"),
    (LLAMA3 | {"original_max_position_embeddings": "long"}, "original_max_position_embeddings"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "mrope_section"),
    ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate"),
])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_what_cannot_be_computed_is_refused_by_its_dotted_name(where: str, section: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"{where}\.{name}: ") as refusal:
        _rope(**{where: section})
    assert refusal.value.param == f"{where}.{name}"


def test_two_sections_that_differ_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="differs from rope_parameters"):
        _rope(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"})
