"""What the terminal shows of many processes: one prefixed line per event, quiet unless asked.

Services log JSON; NATS, Valkey and anything unplanned log text. A line is shown when its level is at least the
console's; text without a level counts as info. Valkey marks advice and goodbyes as warnings too: only those of its
lines that speak of trouble count.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any, TextIO

_RED, _YELLOW, _DIM, _RESET = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
_NAME_COLOURS = ("\x1b[36m", "\x1b[32m", "\x1b[35m", "\x1b[34m", "\x1b[96m", "\x1b[92m")
_NATS_LEVELS = {"ERR": logging.ERROR, "FTL": logging.CRITICAL, "WRN": logging.WARNING}
_NATS = re.compile(r"\[(ERR|FTL|WRN|INF|DBG|TRC)\]")
_VALKEY = re.compile(r"^\d+:[A-Z] .{20,27} # (?!WARNING ).*\b(error|fail|fatal|can't|cannot|bad|wrong)", re.IGNORECASE)
_HIDDEN = frozenset({"event", "level", "timestamp", "service", "service_id", "exception"})


class Console:
    """`fmt` is "console" for people or "json", one object per line. Colours only on a terminal."""

    def __init__(self, fmt: str = "console", verbose: bool = False, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._json = fmt == "json"
        self._least = logging.INFO if verbose else logging.WARNING
        self._colour = self._out.isatty() and not self._json
        self._colours: dict[str, str] = {}

    def child_line(self, name: str, text: str) -> None:
        """One line that a child wrote."""
        level, shown = read_line(text)
        if level >= self._least:
            self._write(name, level, shown, raw=text)

    def say(self, text: str, level: int = logging.INFO) -> None:
        """The supervisor's own word; always shown."""
        self._write("shoal", level, text, raw=text)

    def _write(self, name: str, level: int, text: str, raw: str) -> None:
        if self._json:
            line = json.dumps({"process": name, "level": logging.getLevelName(level).lower(), "line": raw})
        else:
            line = self._painted(name, level, text)
        try:
            print(line, file=self._out, flush=True)
        except (BrokenPipeError, OSError):
            return  # the terminal is gone; the log files go on

    def _painted(self, name: str, level: int, text: str) -> str:
        if not self._colour:
            return f"{name:<12} | {text}"
        colour = self._colours.setdefault(name, _NAME_COLOURS[len(self._colours) % len(_NAME_COLOURS)])
        body = _RED if level >= logging.ERROR else _YELLOW if level >= logging.WARNING else ""
        return f"{colour}{name:<12}{_RESET} {_DIM}|{_RESET} {body}{text}{_RESET if body else ''}"


def read_line(text: str) -> tuple[int, str]:
    """The level of a log line and how people read it."""
    if text.startswith("{"):
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if isinstance(event, dict) and "event" in event:
            return _event_level(event), _event_text(event)
    if match := _NATS.search(text):
        return _NATS_LEVELS.get(match[1], logging.INFO), text
    if _VALKEY.match(text):
        return logging.WARNING, text
    return logging.INFO, text


def _event_level(event: dict[str, Any]) -> int:
    level = logging.getLevelNamesMapping().get(str(event.get("level", "info")).upper())
    return level if level is not None else logging.INFO


def _event_text(event: dict[str, Any]) -> str:
    clock = str(event.get("timestamp", ""))[11:19]
    facts = " ".join(f"{key}={value}" for key, value in event.items() if key not in _HIDDEN)
    head = f"{clock} {event.get('level', 'info')} {event['event']} {facts}".strip()
    return f"{head}\n{event['exception']}" if event.get("exception") else head
