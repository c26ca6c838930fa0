from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from tokenizer_svc.config import TokenizerConfig


@pytest.mark.parametrize(("given", "models"), [
    ("a=/x/A", {"a": Path("/x/A")}),
    ("a=/x/A, b=/y", {"a": Path("/x/A"), "b": Path("/y")}),
    ("/x/Small-1", {"Small-1": Path("/x/Small-1")}),
])
def test_models_are_name_equals_folder_separated_by_commas(given: str, models: dict[str, Path]) -> None:
    assert TokenizerConfig.load(["--models", given], {}).models == models
    assert TokenizerConfig.load([], {"SHOAL_TOKENIZER_MODELS": given}).models == models


def test_a_file_may_hold_a_list_or_a_mapping(tmp_path: Path) -> None:
    for text in ("models: [a=/x]", "models: {a: /x}"):
        (tmp_path / "c.yaml").write_text(text)
        assert TokenizerConfig.load(["--config", str(tmp_path / "c.yaml")], {}).models == {"a": Path("/x")}


@pytest.mark.parametrize("given", ["", "=/x", "a=", "a=/x,a=/y"])
def test_bad_models_stop_the_start_naming_the_field(given: str) -> None:
    with pytest.raises(ConfigError, match="models"):
        TokenizerConfig.load(["--models", given], {})


def test_models_must_be_given() -> None:
    with pytest.raises(ConfigError, match="models"):
        TokenizerConfig.load([], {})
