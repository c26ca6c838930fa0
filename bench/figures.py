"""A measured figure beside what it is compared with, and the report that all areas share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """`ratio` above 1 is better than the peer; `must` is the least ratio that is good enough, if one was set."""

    name: str
    value: float
    unit: str
    peer: str = ""  # what `peer_value` is: a raw limit, a library, another policy, measured in the same run
    peer_value: float | None = None
    ratio: float | None = None
    must: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether `must` is met; None where nothing was demanded."""
        return None if self.must is None or self.ratio is None else self.ratio >= self.must


def report(title: str, figures: Sequence[Figure], json_file: Path | None) -> bool:
    """Print the table and write the JSON; whether every demand is met."""
    from rich.console import Console  # figures are made where nobody looks, too
    from rich.table import Table

    table = Table(title=title)
    for column in ("figure", "value", "unit", "peer", "peer value", "ratio", "must", ""):
        table.add_column(column, justify="left" if column in ("figure", "unit", "peer", "") else "right")
    for figure in figures:
        mark = {True: "[green]ok[/]", False: "[red]missed[/]", None: ""}[figure.ok]
        table.add_row(
            figure.name, _short(figure.value), figure.unit, figure.peer, _short(figure.peer_value),
            _short(figure.ratio), _short(figure.must), mark)
    Console().print(table)
    if json_file is not None:
        write(figures, json_file)
    return all(figure.ok is not False for figure in figures)


def write(figures: Sequence[Figure], json_file: Path) -> None:
    """The figures and where they were measured, as JSON."""
    from stack.environment import collect

    content: dict[str, Any] = {"env": collect(), "figures": [{**asdict(f), "ok": f.ok} for f in figures]}
    json_file.write_text(json.dumps(content, indent=1) + "\n")


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
