"""Tenants over HTTP: what a key allows, prefix hits kept apart, rate limits in a real Valkey, the admin port."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client import REGISTRY

from common.errors import Overloaded
from common.server_url import open_redis
from gateway.config import GatewayConfig
from gateway.service import HttpServer
from gateway.tenants.admin_app import AdminDesk, build_admin_app
from gateway.tenants.redis_limits import RedisLimits
from tests.fakes import MODEL, FakeDecode, says
from tests.http_gateway import M0, HttpGateway, http_gateway
from tests.servers import RealServer

TOKEN = "admin-token-of-this-test"


def line(key: str, said: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {said}\n"


def write(file: Path, text: str, *, append: bool = False) -> None:
    file.write_text((file.read_text() if append else "") + text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(
        line("key-a", "tenant=acme name=laptop") + line("key-b", "tenant=beta")
        + line("key-few", "tenant=few requests_per_minute=2") + line("key-small", "tenant=small tokens_per_minute=12")
        + line("key-model", "tenant=acme models=org/other") + line("key-root", "tenant=ops admin=true") + "plain-key\n")
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def chat(gateway: HttpGateway, key: str, **changes: Any) -> httpx2.Response:
    return await gateway.chat(headers=bearer(key), **changes)


async def test_no_two_tenants_share_a_prefix_hit_whatever_they_send(file: Path) -> None:
    async with http_gateway(api_key_file=str(file)) as gateway:
        for key in ("key-a", "key-b", "plain-key"):
            for salt in ("", "s"):
                assert (await chat(gateway, key, cache_salt=salt)).status_code == 200
        salts = [g.cache_salt for g in gateway.decode.generations]
        assert len(set(salts)) == 6
        assert salts[4:] == ["", "s"], "the default tenant keeps the client's"
        assert [spec and spec.cache_salt for spec in gateway.tokenizer.specs] == salts, "what is hashed is what runs"
        assert (await chat(gateway, "plain-key", cache_salt=salts[0])).status_code == 200
        same = gateway.decode.generations[-1].cache_salt == salts[0]
        assert same, "the salts are equal here, and nobody outside can know one of another tenant"


async def test_a_key_for_other_models_is_refused_with_403_and_lists_its_own(file: Path) -> None:
    async with http_gateway(FakeDecode(names=(MODEL, "org/other")), api_key_file=str(file)) as gateway:
        for stream in (False, True):
            refused = await chat(gateway, "key-model", stream=stream)
            assert refused.status_code == 403
            assert refused.json()["error"] == {
                "message": refused.json()["error"]["message"], "type": "permission_error", "param": "model",
                "code": "permission_denied"}
        assert not gateway.decode.generations
        assert (await chat(gateway, "key-model", model="org/other")).status_code == 200
        listed = await gateway.client.get("/v1/models", headers=bearer("key-model"))
        assert [model["id"] for model in listed.json()["data"]] == ["org/other"]
        for path in (f"/v1/models/{MODEL}", "/v1/models/org/other"):
            answer = await gateway.client.get(path, headers=bearer("key-model"))
            assert answer.status_code == (403 if path.endswith(MODEL) else 200)
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
            answer = await gateway.client.post(path, json={"model": MODEL, **body}, headers=bearer("key-model"))
            assert answer.status_code == 403, path


async def test_a_limited_tenant_is_told_what_is_left_and_then_429(file: Path, valkey: RealServer) -> None:
    async with (http_gateway(api_key_file=str(file), redis_url=valkey.url) as one,
                http_gateway(api_key_file=str(file), redis_url=valkey.url) as two):
        first = await chat(one, "key-few")
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        assert "x-ratelimit-limit-tokens" not in first.headers
        wrong = await chat(two, "key-few", max_tokens=-1)
        assert wrong.status_code == 400
        assert wrong.headers["x-ratelimit-remaining-requests"] == "0", "on refusals too"
        for gateway in (one, two):
            refused = await chat(gateway, "key-few", stream=True)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(refused.headers["retry-after"]) <= 30
            assert 0 < int(refused.headers["retry-after-ms"]) <= 30_000
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        free = await chat(one, "key-a")
        assert free.status_code == 200
        assert not [name for name in free.headers if name.startswith("x-ratelimit")]
        models = await one.client.get("/v1/models", headers=bearer("key-few"))
        assert models.status_code == 200
        assert models.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_charged_by_usage_and_a_debt_is_refused(
    file: Path, valkey: RealServer, stream: bool
) -> None:
    async with http_gateway(
        FakeDecode(script=says("a" * 60)), api_key_file=str(file), redis_url=valkey.url
    ) as gateway:
        first = await chat(gateway, "key-small", max_tokens=50, stream=stream)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-remaining-tokens"] == "12"
        # "user:hi" is 7 tokens and the answer 50: 12 a minute pay for 45 too many, and one to go in with, in 230 s
        refused = await chat(gateway, "key-small", stream=stream)
        assert 170 < int(refused.headers["retry-after"]) <= 230
        assert refused.status_code == 429
        assert "12 tokens per minute" in refused.json()["error"]["message"]
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        assert len(gateway.decode.generations) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_early_pays_for_what_was_used(file: Path, valkey: RealServer, stream: bool) -> None:
    decode = FakeDecode(script=lambda _w, _g: [[97] * 30, asyncio.Event()])
    async with (http_gateway(decode, api_key_file=str(file), redis_url=valkey.url) as gateway,
                admin_port(gateway, valkey.url) as admin):
        with pytest.raises(httpx2.ReadTimeout):
            await gateway.client.post(
                "/v1/chat/completions", json={**M0, "max_tokens": 50, "stream": stream}, headers=bearer("key-small"),
                timeout=0.3)
        async with asyncio.timeout(5):
            while (await admin.get("/limits/small", headers=bearer(TOKEN))).json()["tokens"]["remaining"]:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_before_the_first_token_pays_for_the_prompt_that_a_worker_has(
    file: Path, valkey: RealServer, stream: bool
) -> None:
    decode = FakeDecode(script=lambda _w, _g: [asyncio.Event()])
    async with (http_gateway(decode, api_key_file=str(file), redis_url=valkey.url) as gateway,
                admin_port(gateway, valkey.url) as admin):
        with pytest.raises(httpx2.ReadTimeout):
            await gateway.client.post(
                "/v1/chat/completions", json={**M0, "stream": stream}, headers=bearer("key-small"), timeout=0.3)
        async with asyncio.timeout(5):  # "user:hi" is 7 tokens of 12
            while (await admin.get("/limits/small", headers=bearer(TOKEN))).json()["tokens"]["remaining"] > 6:
                await asyncio.sleep(0.01)


async def test_all_prompts_of_a_call_that_workers_have_are_paid_for(file: Path, valkey: RealServer) -> None:
    decode = FakeDecode(script=lambda _w, _g: [asyncio.Event()])
    async with (http_gateway(decode, api_key_file=str(file), redis_url=valkey.url) as gateway,
                admin_port(gateway, valkey.url) as admin):
        with pytest.raises(httpx2.ReadTimeout):
            await gateway.client.post(
                "/v1/completions", json={"model": MODEL, "prompt": ["abcdef", "ghijkl"]}, headers=bearer("key-small"),
                timeout=0.3)
        async with asyncio.timeout(5):
            while (await admin.get("/limits/small", headers=bearer(TOKEN))).json()["tokens"]["remaining"] > 1:
                await asyncio.sleep(0.01)


async def test_a_request_that_no_worker_takes_costs_no_tokens(file: Path, valkey: RealServer) -> None:
    decode = FakeDecode(script=lambda _w, _g: [Overloaded("full", retry_after_s=1.0)])
    async with (http_gateway(decode, api_key_file=str(file), redis_url=valkey.url) as gateway,
                admin_port(gateway, valkey.url) as admin):
        assert (await chat(gateway, "key-small")).status_code == 503
        assert (await admin.get("/limits/small", headers=bearer(TOKEN))).json()["tokens"]["remaining"] == 12


async def test_a_tenant_that_is_gone_by_the_end_of_its_request_has_no_series(file: Path) -> None:
    go_on = asyncio.Event()
    decode = FakeDecode(script=lambda _w, _g: [[97], go_on, [98]])
    async with http_gateway(decode, api_key_file=str(file)) as gateway:
        running = asyncio.create_task(chat(gateway, "key-b"))
        while not decode.generations:
            await asyncio.sleep(0.01)
        write(file, line("key-a", "tenant=acme"))
        assert await gateway.keys.reload()
        go_on.set()
        assert (await running).status_code == 200
        assert not [s for m in REGISTRY.collect() for s in m.samples if s.labels.get("tenant") == "beta"]


async def test_the_openai_client_reads_the_limit(file: Path, valkey: RealServer) -> None:
    async with http_gateway(api_key_file=str(file), redis_url=valkey.url) as gateway:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="key-few", max_retries=0) as client:
            for _ in range(2):
                await client.models.list()
                await client.completions.create(model=MODEL, prompt="a", max_tokens=1)
            with pytest.raises(openai.RateLimitError) as refused:
                await client.completions.create(model=MODEL, prompt="a", max_tokens=1)
            assert refused.value.code == "rate_limit_exceeded"
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="key-model", max_retries=0) as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.completions.create(model=MODEL, prompt="a", max_tokens=1)


@pytest.mark.parametrize(("on_failure", "status"), [("allow", 200), ("refuse", 503)])
async def test_without_redis_the_configuration_decides_and_it_is_counted(
    file: Path, on_failure: str, status: int
) -> None:
    def failures() -> float:
        return REGISTRY.get_sample_value("shoal_gateway_rate_limit_failures_total", {"call": "admit"}) or 0.0

    settings = {"redis_url": "redis://127.0.0.1:1/0", "rate_limit_on_failure": on_failure}
    async with http_gateway(api_key_file=str(file), **settings) as gateway:
        before = failures()
        answer = await chat(gateway, "key-few")
        assert answer.status_code == status
        assert ("retry-after" in answer.headers) == (status == 503)
        assert failures() == before + 1
        assert (await chat(gateway, "key-a")).status_code == 200, "an unlimited tenant needs no Redis"
        assert (await gateway.client.get("/v1/models", headers=bearer("key-few"))).status_code == 200


async def test_no_client_makes_a_series(file: Path, valkey: RealServer) -> None:
    def series() -> int:
        return sum(len(metric.samples) for metric in REGISTRY.collect())

    async with http_gateway(api_key_file=str(file), redis_url=valkey.url) as gateway:
        for key in ("key-a", "key-few", "wrong-key"):
            await chat(gateway, key)
        before = series()
        for number in range(200):
            await gateway.chat(headers={**bearer(f"wrong-{number}"), "x-tenant": f"t{number}"})
            await gateway.chat(headers={**bearer("key-a"), "x-tenant": f"t{number}"}, user=f"u{number}",
                               cache_salt=f"s{number}", max_tokens=1)
        assert series() <= before + 20


async def test_a_tenant_does_not_see_the_metrics_of_others(file: Path) -> None:
    async with http_gateway(api_key_file=str(file)) as gateway:
        for key, status in (("key-a", 403), ("key-root", 200), ("plain-key", 200)):
            assert (await gateway.client.get("/metrics", headers=bearer(key))).status_code == status


@asynccontextmanager
async def admin_port(gateway: HttpGateway, url: str, token: str = TOKEN) -> AsyncIterator[httpx2.AsyncClient]:
    redis = open_redis(url)

    async def begin_drain() -> int:
        gateway.admission.start_drain()
        return gateway.admission.num_running

    server = HttpServer(build_admin_app(AdminDesk(gateway.keys, RedisLimits(redis, 5.0), begin_drain), token),
                        GatewayConfig(port=0))
    await server.start()
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20) as client:
        try:
            yield client
        finally:
            await server.stop()
            await redis.aclose()


async def test_every_admin_path_wants_the_admin_and_none_is_on_the_public_port(
    file: Path, valkey: RealServer
) -> None:
    async with (http_gateway(api_key_file=str(file), redis_url=valkey.url) as gateway,
                admin_port(gateway, valkey.url) as admin):
        for method, path in (("GET", "/keys"), ("POST", "/reload"), ("GET", "/limits/few"), ("POST", "/drain"),
                             ("GET", "/health"), ("GET", "/nope"), ("GET", "/openapi.json"), ("GET", "//keys")):
            for headers, status in (({}, 401), (bearer("wrong-token"), 401), (bearer("key-a"), 403),
                                    ({"authorization": TOKEN}, 401)):
                answer = await admin.request(method, path, headers=headers)
                assert answer.status_code == status, (path, headers)
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        for path in ("/keys", "/reload", "/limits/few", "/drain"):
            for method in ("GET", "POST"):
                answer = await gateway.client.request(method, gateway.url + path, headers=bearer("key-root"))
                assert answer.status_code == 404, path
        assert not gateway.admission.draining
        for key in (TOKEN, "key-root"):
            assert (await admin.get("/keys", headers=bearer(key))).status_code == 200


async def test_an_empty_admin_token_opens_nothing(valkey: RealServer) -> None:
    async with http_gateway(redis_url=valkey.url) as gateway, admin_port(gateway, valkey.url, token="") as admin:
        for headers in ({}, {"authorization": "Bearer"}, bearer("x")):
            assert (await admin.get("/keys", headers=headers)).status_code == 401


async def test_the_admin_sees_keys_by_name_and_reloads_them(file: Path, valkey: RealServer) -> None:
    async with (http_gateway(api_key_file=str(file), redis_url=valkey.url) as gateway,
                admin_port(gateway, valkey.url) as admin):
        listed = await admin.get("/keys", headers=bearer(TOKEN))
        assert listed.json()["data"][0] == {
            "name": "laptop", "tenant": "acme", "line": 1, "models": None, "expires": None, "priority": None,
            "admin": False}
        assert len(listed.json()["data"]) == 7
        assert hashlib.sha256(b"key-a").hexdigest()[:12] not in listed.text
        assert "plain-key" not in listed.text

        write(file, line("key-new", "tenant=new"), append=True)
        assert (await chat(gateway, "key-new")).status_code == 401
        changed = await admin.post("/reload", headers=bearer(TOKEN))
        assert changed.json() == {"changed": True, "num_keys": 8, "num_tenants": 7}
        assert (await chat(gateway, "key-new")).status_code == 200
        write(file, "sha256:nonsense")
        broken = await admin.post("/reload", headers=bearer(TOKEN))
        assert broken.status_code == 400
        assert "line 1" in broken.json()["error"]["message"]
        assert (await chat(gateway, "key-new")).status_code == 200


async def test_the_admin_sees_limits_and_takes_nothing_of_them(file: Path, valkey: RealServer) -> None:
    async with (http_gateway(api_key_file=str(file), redis_url=valkey.url) as gateway,
                admin_port(gateway, valkey.url) as admin):
        await chat(gateway, "key-few")
        for _ in range(3):
            shown = (await admin.get("/limits/few", headers=bearer(TOKEN))).json()
            assert (shown["tenant"], shown["tokens"]) == ("few", None)
            assert (shown["requests"]["limit_per_minute"], shown["requests"]["remaining"]) == (2, 1)
        assert (await admin.get("/limits/acme", headers=bearer(TOKEN))).json()["requests"] is None
        assert (await admin.get("/limits/nobody", headers=bearer(TOKEN))).status_code == 404


async def test_a_drain_from_outside_refuses_new_work_and_lets_the_rest_end(file: Path, valkey: RealServer) -> None:
    go_on = asyncio.Event()
    decode = FakeDecode(script=lambda _w, _g: [[97], go_on, [98]])
    async with (http_gateway(decode, api_key_file=str(file), redis_url=valkey.url) as gateway,
                admin_port(gateway, valkey.url) as admin):
        running = asyncio.create_task(chat(gateway, "key-a"))
        while not decode.generations:
            await asyncio.sleep(0.01)
        drained = await admin.post("/drain", headers=bearer(TOKEN))
        assert drained.json() == {"status": "draining", "num_requests": 1}
        assert (await gateway.client.get("/ready")).status_code == 503
        assert (await chat(gateway, "key-a")).status_code == 503
        go_on.set()
        assert (await running).status_code == 200
