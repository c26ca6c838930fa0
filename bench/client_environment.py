"""A virtual environment for one outside program: such programs want versions that neither we nor each other can have.

States: absent → made (its stamp names the packages asked for) → absent again, when others are asked for.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_INSTALL_S: Final = 1800.0
_STAMP: Final = "packages.txt"


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """`packages` are pip requirements, from the index that pip is configured for."""

    folder: Path
    packages: tuple[str, ...]

    @property
    def is_made(self) -> bool:
        stamp = self.folder / _STAMP
        return stamp.exists() and stamp.read_text() == self._wanted

    def make(self) -> None:
        """Make it anew. Raises `CalledProcessError`, and leaves no stamp, when a package cannot be installed."""
        print(f"installing {' '.join(self.packages)} into {self.folder}", file=sys.stderr, flush=True)
        venv.create(self.folder, with_pip=True, clear=True)
        subprocess.run([self.program("python"), "-m", "pip", "install", "--quiet", *self.packages],
                       check=True, timeout=_INSTALL_S)
        (self.folder / _STAMP).write_text(self._wanted)

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    @property
    def _wanted(self) -> str:
        return "".join(f"{package}\n" for package in self.packages)
