"""Which metrics and labels a PromQL expression names; enough of the grammar for our dashboards and rules."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?\{([^}]*)\}")
_MATCHER = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_NAME = re.compile(r"(?<![\w:.])([a-zA-Z_:][a-zA-Z0-9_:]*)(?!\s*\(|[\w:])")
_KEYWORDS = frozenset({"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring"})


@dataclass
class Names:
    """`matched` are the labels that a metric's selectors name, `grouped` those of all groupings together."""

    matched: dict[str, set[str]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)

    @property
    def metrics(self) -> set[str]:
        return set(self.matched)


def names(expr: str) -> Names:
    found = Names()
    rest = re.sub(r"\[[^\]]*\]", " ", _STRING.sub('""', expr))
    for name, matchers in _SELECTOR.findall(rest):
        found.matched.setdefault(name, set()).update(_MATCHER.findall(matchers))
    rest = _SELECTOR.sub(" ", rest)
    for clause, labels in _GROUPING.findall(rest):
        if clause != "without":
            found.grouped.update(label.strip() for label in labels.split(",") if label.strip())
    rest = re.sub(r"\boffset\s+\w+", " ", _GROUPING.sub(" ", rest))
    for name in _NAME.findall(rest):
        if name not in _KEYWORDS:
            found.matched.setdefault(name, set())
    return found


def faults(expr: str, labels: Mapping[str, Collection[str]]) -> list[str]:
    """What an expression asks for that is not there; `labels` are those of every metric that is."""
    asked = names(expr)
    missing = sorted(metric for metric in asked.metrics if metric not in labels)
    if missing:
        return [f"no metric {metric}" for metric in missing]
    found = [f"{metric} has no label {label}" for metric, matched in asked.matched.items()
             for label in sorted(matched - set(labels[metric]))]
    known = {label for metric in asked.metrics for label in labels[metric]}
    return found + [f"groups by {label}, which nothing has" for label in sorted(asked.grouped - known) if known]
