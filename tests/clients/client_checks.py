"""What the scripts of this folder share. It runs in each client's own environment: nothing but Python is there."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

CITIES = ("Paris", "Rome")
MAX_DEGREES = 40
ASK = "What is the capital of France?"
ASK_WEATHER = "What is the weather in Paris?"

Check = Callable[[str, str], Any]


def run(*checks: Check) -> None:
    """Call each with (base URL with /v1, model), both from the command line; a line for each; exit 1 if one failed."""
    url, model = sys.argv[1:3]
    failed = False
    with asyncio.Runner() as loop:  # one for all, so that what a client keeps open is closed in the loop it was made in
        for check in checks:
            try:
                result = check(url, model)
                if inspect.iscoroutine(result):
                    loop.run(result)
                print(f"ok {check.__name__}", flush=True)
            except Exception:
                failed = True
                print(f"FAILED {check.__name__}\n{traceback.format_exc()}", flush=True)
    sys.exit(int(failed))


def is_weather(value: Any) -> bool:
    """A whole answer of the asked shape."""
    fields = value if isinstance(value, dict) else value.model_dump()
    return (set(fields) == {"city", "degrees"} and fields["city"] in CITIES
            and type(fields["degrees"]) is int and 0 <= fields["degrees"] <= MAX_DEGREES)
