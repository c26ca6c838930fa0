"""Generate the stubs: `python -m proto.gen` writes them, `python -m proto.gen --check` fails if they are stale.

Generated with an older grpcio-tools (pinned in constraints.txt) so that they load on older runtimes too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def _generate(out: Path) -> None:
    from grpc_tools import protoc  # type: ignore[import-untyped]

    files = sorted(str(p.relative_to(HERE.parent)) for p in HERE.glob("*.proto"))
    args = ["protoc", f"-I{HERE.parent}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", *files]
    if protoc.main(args) != 0:
        raise SystemExit("protoc failed")


def _stubs(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in folder.iterdir() if p.name.endswith(SUFFIXES)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proto.gen", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 when a stub is stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as tmp:
        _generate(Path(tmp))
        fresh, committed = _stubs(Path(tmp) / "proto"), _stubs(HERE)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if check:
        for name in stale:
            print(f"stale: proto/{name} (run: python -m proto.gen)", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        path = HERE / name
        path.write_text(fresh[name]) if name in fresh else path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
