from __future__ import annotations

import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from bench.client_environment import ClientEnvironment


def wheel(folder: Path, name: str) -> str:
    """A package whose module says its name."""
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{name}.py", f"print('{name}')")
        made.writestr(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        made.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{name}-1.dist-info/RECORD", "")
    return str(path)


def imports(environment: ClientEnvironment, name: str) -> bool:
    ended = subprocess.run([environment.program("python"), "-m", name], capture_output=True, text=True, check=False)
    return ended.stdout.strip() == name


def test_an_environment_is_made_anew_when_other_packages_are_asked_for(tmp_path: Path) -> None:
    first = ClientEnvironment(tmp_path / "venv", (wheel(tmp_path, "first"),))
    assert not first.is_made
    first.make()
    assert first.is_made
    assert imports(first, "first")
    second = replace(first, packages=(wheel(tmp_path, "second"),))
    assert not second.is_made
    second.make()
    assert imports(second, "second")
    assert not imports(second, "first")
    assert not first.is_made


def test_an_environment_whose_packages_cannot_be_installed_is_not_made(tmp_path: Path) -> None:
    broken = ClientEnvironment(tmp_path / "venv", (str(tmp_path / "nowhere-1-py3-none-any.whl"),))
    with pytest.raises(subprocess.CalledProcessError):
        broken.make()
    assert not broken.is_made
