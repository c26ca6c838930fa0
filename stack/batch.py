"""`shoal batch`: a file of requests in OpenAI's Batch format against a gateway, resumable.

A request: read → sent → answered well (a line in the output file), or refused, broken or given up (a line in the error
file. A second run with the same files sends only what has no line in the output file; the error file begins anew. Both
are touched only when each line in them is one of a batch, and while no other run has the output. Files are UTF-8.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import httpx2
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from stack.api_client import tls_context

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_TRIES = 6
MAX_WAIT_S = 30.0
_LINE_START = b'{"id": "batch_req_'  # of every line that is written here
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
    """`timeout_s` is of each request, with all its tries.

    Raises `NotFound` for a missing file, `InvalidRequest` for a line that is not a request or, in a file to write, not
    one of a batch, `ConfigError` for one file in two roles, `Unavailable` while another run writes the output.
    """
    _check_roles(source, output, errors)
    requests = list(read_requests(source))
    with _opened(output) as answers, _opened(errors) as refusals:
        batch_lines(errors, refusals)
        done = finished_ids(output, answers)
        refusals.truncate(0)
        counts = BatchCounts(num_done_before=sum(request.custom_id in done for request in requests))
        todo = iter([request for request in requests if request.custom_id not in done])
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        async with _client(gateway, api_key, concurrency) as http:
            with Progress(*columns) as bar:
                task = bar.add_task("requests", total=len(requests), completed=counts.num_done_before)

                async def work() -> None:
                    for request in todo:
                        line = await _answered(http, request, timeout_s)
                        is_good = line["error"] is None and line["response"]["status_code"] == 200
                        _write(answers if is_good else refusals, line)
                        counts.num_completed += is_good
                        counts.num_failed += not is_good
                        bar.advance(task)

                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(work())
    return counts


def _client(gateway: str, api_key: str, concurrency: int) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    return httpx2.AsyncClient(base_url=gateway, headers=headers, timeout=None, limits=limits, trust_env=False,
                              verify=tls_context(gateway) or True)


def _check_roles(source: Path, output: Path, errors: Path) -> None:
    for name, path, other in (("output", output, source), ("errors", errors, source), ("errors", errors, output)):
        if path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other)):
            raise ConfigError(f"{name}: {path} is {other}; each file of a batch must be another", param=name)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """To read and to append to, for this run alone."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(f"{path}: another run writes this file") from None
        yield file


def read_requests(source: Path) -> Iterator[BatchRequest]:
    try:
        lines = source.read_bytes().split(b"\n")
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


def finished_ids(output: Path, file: BinaryIO) -> set[str]:
    """Of the whole lines in the output; a last line that was cut is taken off, so that its request runs again."""
    ids, size = batch_lines(output, file)
    file.truncate(size)
    return ids


def batch_lines(path: Path, file: BinaryIO) -> tuple[set[str], int]:
    """The custom ids of the whole lines, and their size in bytes. Raises `InvalidRequest` for a line of no batch."""
    file.seek(0)
    *whole, cut = file.read().split(b"\n")
    ids = set()
    for number, line in enumerate(whole, 1):
        try:
            parsed = json.loads(line) if line.strip() else None
        except ValueError:
            parsed = {}
        if parsed is None:
            continue
        custom_id = parsed.get("custom_id") if isinstance(parsed, dict) and "response" in parsed else None
        if not isinstance(custom_id, str):
            raise _not_of_a_batch(path, number)
        ids.add(custom_id)
    if not (cut.startswith(_LINE_START) or _LINE_START.startswith(cut)):
        raise _not_of_a_batch(path, len(whole) + 1)
    return ids, sum(len(line) + 1 for line in whole)


def _not_of_a_batch(path: Path, number: int) -> InvalidRequest:
    return InvalidRequest(f"{path}:{number}: not an answer of a batch; the file was left as it is")


async def _answered(http: httpx2.AsyncClient, request: BatchRequest, timeout_s: float) -> dict[str, Any]:
    """`answer`, in time and whatever happens: one request never ends the others."""
    try:
        async with asyncio.timeout(timeout_s):
            return await answer(http, request)
    except TimeoutError:
        return _line(request, None, {"code": "timeout", "message": f"no answer within {timeout_s:g} s"})
    except Exception as error:
        return _line(request, None, {"code": "client_error", "message": f"{type(error).__name__}: {error}"})


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


def _parse(line: bytes, where: str) -> BatchRequest:
    try:
        raw = json.loads(line.decode(), parse_constant=_refuse_constant)
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{where}: holds half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError) as error:
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _line(request: BatchRequest, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": request.custom_id, "response": response,
            "error": error}


def _write(file: BinaryIO, line: dict[str, Any]) -> None:
    try:
        raw = json.dumps(line, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # an answer with half of a surrogate pair
        raw = json.dumps(line).encode()
    file.write(raw + b"\n")
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
