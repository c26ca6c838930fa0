"""Who gets in, and what a stranger can make the metrics hold: over HTTP on real processes that want an API key."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx2
import pytest

from stack.ports import free_port
from stack.scrape import Sample, samples
from tests.e2e.api import Api, refusal
from tests.stack import RunningStack

KEY, ADMIN_TOKEN = "the-right-key-9f3a", "the-admin-token-77b1"
OPEN = {"/health", "/live", "/ping", "/ready"}
ADMIN_PATHS = ("/keys", "/reload", "/limits/default", "/drain")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
NOT_A_KEY: tuple[tuple[str, ...], ...] = (
    (), ("Bearer the-wrong-key",), ("Bearer",), ("Bearer ",), (f"bearer {KEY}",), (KEY,), (f"Basic {KEY}",),
    (f"Bearer {KEY}x",), (f"Bearer  {KEY}",), (f"Bearer {KEY}", f"Bearer {KEY}"), ("Bearer nope", f"Bearer {KEY}"))
NUM_STRANGE = 1000
MARK = "stranger"  # in every string that a client chooses here
MAX_NEW_SERIES = 20


@pytest.fixture(scope="module")
def admin_port() -> int:
    return free_port("127.0.0.1")


@pytest.fixture(scope="module")
def stack(smollm2: Path, admin_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    env = {"SHOAL_GATEWAY_ADMIN_PORT": str(admin_port), "SHOAL_GATEWAY_ADMIN_TOKEN": ADMIN_TOKEN}
    with RunningStack(tmp_path_factory.mktemp("stack"), model=smollm2, runner="mock-echo", kvstore=0, router=1,
                      api_key=KEY, env=env) as running:
        yield running


@pytest.fixture
async def api(stack: RunningStack) -> AsyncIterator[Api]:
    async with httpx2.AsyncClient(
        base_url=stack.url, timeout=30, headers={"authorization": f"Bearer {KEY}"}
    ) as client:
        yield Api(stack, client, echoes=True)


Answer = tuple[int, bytes]


def asked(url: str, requests: Iterable[tuple[str, str, Sequence[str]]]) -> list[Answer]:
    """Answers to (method, path as it goes over the wire, Authorization headers), on one connection."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    answers: list[Answer] = []
    for method, path, sent in requests:
        connection.putrequest(method, path)
        for value in sent:
            connection.putheader("Authorization", value)
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        answer = connection.getresponse()
        answers.append((answer.status, answer.read()))
    connection.close()
    return answers


async def paths_of(api: Api) -> list[str]:
    """Every route, as the server's own document lists them."""
    document = (await api.client.get("/openapi.json")).json()
    return [path.replace("{model_id}", api.stack.model) for path in document["paths"]]


def variants(path: str) -> list[str]:
    """Spellings by which a guard may be passed."""
    head, _, tail = path.rpartition("/")
    return [path + "/", "/" + path, path.upper(), f"{head}%2F{tail}", f"/health/..{path}", f"/./{path[1:]}",
            path + "%20", path + ";x", path + "%00", f"/ready?{path}"]


async def test_every_route_and_every_spelling_of_it_wants_the_key_but_four_probes(api: Api) -> None:
    """B17"""
    paths = await paths_of(api)
    assert len(paths) >= 14
    assert set(paths) >= OPEN | {"/v1/chat/completions", "/v1/completions", "/metrics", "/load", "/server_info"}
    spelled = [spelling for path in paths for spelling in variants(path)]
    closed = [path for path in paths if path not in OPEN]
    others = ["/openapi.json", "/docs", "/redoc", "/nope", "/", "*", "http://x/v1/models", "/ready?verbose",
              "/ready?%76erbose", *ADMIN_PATHS]
    requests = [*((method, path, sent) for path in closed for method in METHODS for sent in NOT_A_KEY),
                *((method, path, sent) for path in (*spelled, *others) for method in ("GET", "POST")
                  for sent in ((), (f"bearer {KEY}",)))]
    for (method, path, sent), (status, body) in zip(
        requests, await asyncio.to_thread(asked, api.stack.url, requests), strict=True
    ):
        assert status in (400, 401), (method, path, sent, status)
        if status == 401 and method != "HEAD":
            error = json.loads(body)["error"]
            assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, "invalid_api_key")
            assert KEY.encode() not in body
    for path in OPEN:
        assert {status for status, _ in await asyncio.to_thread(
            asked, api.stack.url, [("GET", path, ()), ("HEAD", path, ())])} == {200}


async def test_the_right_key_opens_every_route(api: Api) -> None:
    """B17"""
    requests = [("GET", path, (f"Bearer {KEY}",)) for path in (*await paths_of(api), "/openapi.json")]
    statuses = [status for status, _ in await asyncio.to_thread(asked, api.stack.url, requests)]
    assert set(statuses) == {200, 405}
    assert (await api.chat()).status_code == 200


async def test_what_is_for_an_admin_is_on_its_own_port_and_opens_to_its_token_alone(
    api: Api, admin_port: int
) -> None:
    """B17"""
    admin_url, right = f"http://127.0.0.1:{admin_port}", (f"Bearer {KEY}",)
    for path in ADMIN_PATHS:
        for method in ("GET", "POST"):
            (public, *_), *_ = await asyncio.to_thread(asked, api.stack.url, [(method, path, right)])
            assert public == 404, path
            requests = [(method, path, sent) for sent in NOT_A_KEY]
            assert {status for status, _ in await asyncio.to_thread(asked, admin_url, requests)} == {401}, path
            (user, *_), *_ = await asyncio.to_thread(asked, admin_url, [(method, path, right)])
            assert user == 403, path
    for path in ("/", "/nope", "/openapi.json", "/docs", "/health", "//keys", "/keys/", "/v1/models"):
        assert (await asyncio.to_thread(asked, admin_url, [("GET", path, ())]))[0][0] == 401, path
    (status, body), *_ = await asyncio.to_thread(asked, admin_url, [("GET", "/keys", (f"Bearer {ADMIN_TOKEN}",))])
    assert status == 200
    assert KEY.encode() not in body
    assert await api.is_alive()


def all_series(stack: RunningStack) -> list[Sample]:
    """Of every process that has metrics."""
    addresses = [service.metrics_address for service in stack.state.processes.values()]
    return [sample for address in addresses if address for sample in samples(address)]


async def test_what_clients_choose_never_becomes_a_series_or_a_label(api: Api) -> None:
    """B29"""
    width = asyncio.Semaphore(16)

    async def strange(kind: str) -> int:
        name = f"{MARK}-{uuid4().hex}"
        headers = {"x-request-id": name, "x-correlation-id": name, "x-session-affinity": name, f"x-{name}": name,
                   "user-agent": name, "traceparent": f"00-{uuid4().hex}-{uuid4().hex[:16]}-01"}
        async with width:
            match kind:
                case "model":
                    answer = await api.chat(model=name)
                case "path":
                    answer = await api.client.get(f"/{name}", params={"q": name})
                case "model path":
                    answer = await api.client.get(f"/v1/models/{name}")
                case "wrong key":
                    answer = await api.client.get("/v1/models", headers={"authorization": f"Bearer {name}"})
                case "method":
                    answer = await api.client.request(name.replace("-", ""), "/v1/models")
                case _:
                    fields: dict[str, Any] = {
                        "user": name, "request_id": name, "rid": name, "session_id": name, "prompt_cache_key": name,
                        "cache_salt": name, "safety_identifier": name, "metadata": {name: name}, name: 1}
                    answer = await api.complete(name, headers, max_tokens=1, **fields)
        return answer.status_code

    async def many(kind: str, count: int) -> set[int]:
        return set(await asyncio.gather(*(strange(kind) for _ in range(count))))

    kinds = {"model": {404}, "path": {404}, "ids": {200}, "model path": {404}, "wrong key": {401},
             "method": {400, 405, 501}}
    for kind in kinds:
        await many(kind, 2)
    before = await asyncio.to_thread(all_series, api.stack)
    for kind, statuses in kinds.items():
        assert await many(kind, NUM_STRANGE if kind in ("model", "path", "ids") else 100) <= statuses, kind
    after = await asyncio.to_thread(all_series, api.stack)
    assert len(before) > 100
    assert len(after) - len(before) <= MAX_NEW_SERIES
    labels = {value for sample in after for value in sample.labels.values()}
    assert not [value for value in labels if MARK in value.lower() or KEY in value]
    unmatched = [s.value for s in after if s.name == "shoal_gateway_requests_total"
                 and (s.labels["endpoint"], s.labels["status"]) == ("unmatched", "404")]
    assert sum(unmatched) >= NUM_STRANGE, "they were counted, in one bucket"
    refusal(await api.chat(model=f"{MARK}-again"), [404], "model_not_found")
    assert await api.is_alive()
