"""`shoal batch`: a file of requests in OpenAI's Batch format against a gateway, resumable.

A request: read → sent → answered well (a line in the output file), or refused, broken or given up (a line in the error
file). A second run with the same files sends only what has no line in the output file; the error file begins anew.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx2
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.errors import InvalidRequest, NotFound

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_TRIES = 6
MAX_WAIT_S = 30.0
_REPEATABLE = frozenset({408, 429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(slots=True)
class BatchCounts:
    num_done_before: int = 0
    num_completed: int = 0
    num_failed: int = 0


async def run_batch(
    source: Path, output: Path, errors: Path, gateway: str, api_key: str, *, concurrency: int, timeout_s: float
) -> BatchCounts:
    """Raises `NotFound` for a missing file and `InvalidRequest` for a line that is not a request."""
    requests = list(read_requests(source))
    done = finished_ids(output)
    counts = BatchCounts(num_done_before=sum(request.custom_id in done for request in requests))
    todo = iter([request for request in requests if request.custom_id not in done])
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with httpx2.AsyncClient(base_url=gateway, headers=headers, timeout=timeout_s, trust_env=False) as http:
        with output.open("a") as answers, errors.open("w") as refusals, Progress(*columns) as bar:
            task = bar.add_task("requests", total=len(requests), completed=counts.num_done_before)

            async def work() -> None:
                for request in todo:
                    line = await answer(http, request)
                    is_good = line["error"] is None and line["response"]["status_code"] == 200
                    _write(answers if is_good else refusals, line)
                    counts.num_completed += is_good
                    counts.num_failed += not is_good
                    bar.advance(task)

            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work())
    return counts


def read_requests(source: Path) -> Iterator[BatchRequest]:
    try:
        lines = source.read_text().splitlines()
    except OSError as error:
        raise NotFound(f"{source}: {error.strerror}") from None
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            request = _parse(line, f"{source}:{number}")
            if request.custom_id in seen:
                raise InvalidRequest(f"{source}:{number}: custom_id {request.custom_id!r} is there twice",
                                     param="custom_id")
            seen.add(request.custom_id)
            yield request


def finished_ids(output: Path) -> set[str]:
    """Of the whole lines in the output; a last line that was cut is taken off, so that its request runs again."""
    if not output.exists():
        return set()
    raw = output.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        output.write_bytes(whole)
    return {json.loads(line)["custom_id"] for line in whole.splitlines() if line.strip()}


async def answer(http: httpx2.AsyncClient, request: BatchRequest) -> dict[str, Any]:
    """The output line of one request, after at most `MAX_TRIES` tries."""
    failure: dict[str, Any] | None = None
    for attempt in range(MAX_TRIES):
        try:
            got = await http.post(request.url, json=request.body)
        except httpx2.HTTPError as error:
            failure = {"code": "connection_error", "message": f"{type(error).__name__}: {error}".rstrip(": ")}
            await asyncio.sleep(_pause_s(attempt, None))
            continue
        if got.status_code in _REPEATABLE and attempt + 1 < MAX_TRIES:
            await asyncio.sleep(_pause_s(attempt, got.headers.get("retry-after")))
            continue
        response = {"status_code": got.status_code, "request_id": got.headers.get("x-request-id", ""),
                    "body": _json(got)}
        return _line(request, response, None)
    return _line(request, None, failure)


def _parse(line: str, where: str) -> BatchRequest:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{where}: must be a JSON object")
    for field, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if not isinstance(raw.get(field), kind):
            raise InvalidRequest(f"{where}: {field} must be a {kind.__name__}", param=field)
    if raw.get("method", "POST") != "POST":
        raise InvalidRequest(f"{where}: method must be POST, got {raw['method']!r}", param="method")
    if raw["url"] not in URLS:
        raise InvalidRequest(f"{where}: url must be one of {', '.join(URLS)}, got {raw['url']!r}", param="url")
    if raw["body"].get("stream"):
        raise InvalidRequest(f"{where}: body.stream must not be set in a batch", param="body.stream")
    return BatchRequest(raw["custom_id"], raw["url"], raw["body"])


def _line(request: BatchRequest, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": request.custom_id, "response": response,
            "error": error}


def _write(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()


def _pause_s(attempt: int, retry_after: str | None) -> float:
    try:
        asked_s = float(retry_after) if retry_after else 0.0
    except ValueError:
        asked_s = 0.0
    return min(MAX_WAIT_S, max(asked_s, 0.25 * 2.0**attempt)) * random.uniform(1.0, 1.2)


def _json(got: httpx2.Response) -> Any:
    try:
        return got.json()
    except ValueError:
        return {"text": got.text}
