"""Lets browsers on other origins call the gateway, where the configuration names them."""

from __future__ import annotations

import re
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

ANY: Final = "*"
EXPOSED: Final = (
    "x-request-id", "x-trace-id", "retry-after", "retry-after-ms",
    *(f"x-ratelimit-{fact}-{kind}" for fact in ("limit", "remaining", "reset") for kind in ("requests", "tokens")))
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


def origins_of(listed: str) -> tuple[str, ...]:
    """Origins with commas between them, or `*` alone. Raises `ValueError` for what no browser sends as one."""
    origins = tuple(origin.strip() for origin in listed.split(",") if origin.strip())
    wrong = [origin for origin in origins if not _ORIGIN.fullmatch(origin)]
    if wrong and origins != (ANY,):
        raise ValueError(
            f"{wrong[0]!r} is no origin: write {ANY} alone, or scheme://host[:port] in lower case without a path")
    return origins


def allow_origins(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """`app`, with CORS headers on every answer. Preflights are answered here: they carry no key."""
    if not origins:
        return app
    return CORSMiddleware(app, allow_origins=origins, allow_methods=("GET", "HEAD", "POST"), allow_headers=(ANY,),
                          expose_headers=EXPOSED)
