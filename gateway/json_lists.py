"""JSON of long lists, made slice by slice: no one step keeps the other threads of the process waiting for long.

orjson holds the interpreter while it encodes. A list that is encoded already costs the answer around it one copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

import orjson

SLICE: Final = 256  # items


def encoded(items: Iterable[Any]) -> bytes:
    """The items as JSON, without the brackets around them. Items that are made on the way do not gather."""
    rest = iter(items)
    return b",".join(orjson.dumps(part)[1:-1] for part in iter(lambda: list(islice(rest, SLICE)), []))


def json_list(*parts: bytes) -> orjson.Fragment:
    """One list of what `encoded` made, part after part; empty ones add nothing."""
    return orjson.Fragment(b"[" + b",".join(filter(None, parts)) + b"]")
