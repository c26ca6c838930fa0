"""Writes the JSON that Grafana loads: `python -m deploy.grafana.dashboards [--check]`.

`--check` writes nothing and ends with 1 when a file is not what the Python says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deploy.grafana.boards.engine import ENGINE
from deploy.grafana.boards.gateway import GATEWAY_INTERNALS
from deploy.grafana.boards.kv_tiers import KV_TIERS
from deploy.grafana.boards.overview import OVERVIEW
from deploy.grafana.boards.prefill_decode import PREFILL_DECODE
from deploy.grafana.boards.router import ROUTER

DASHBOARDS = (OVERVIEW, PREFILL_DECODE, KV_TIERS, ROUTER, GATEWAY_INTERNALS, ENGINE)
FOLDER = Path(__file__).parent / "dashboards"


def rendered() -> dict[Path, str]:
    """What each file is to hold."""
    return {FOLDER / f"{board.uid}.json": json.dumps(board.json(), indent=1, ensure_ascii=False) + "\n"
            for board in DASHBOARDS}


def stale() -> list[Path]:
    """Files that differ from what they are to hold, are missing, or belong to no dashboard."""
    wanted = rendered()
    differ = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    return differ + [path for path in sorted(FOLDER.glob("*.json")) if path not in wanted]


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        for path in stale():
            print(f"{path.name} is not what deploy/grafana says: run python -m deploy.grafana.dashboards")
        return int(bool(stale()))
    FOLDER.mkdir(exist_ok=True)
    for path in stale():
        path.unlink(missing_ok=True)
    for path, text in rendered().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
