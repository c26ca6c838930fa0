"""Tenants on a real stack of two gateways: prefix hits are a tenant's own, keys come and limits count on both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2

from stack.keys import new_key
from tests.stack import RunningStack

PROMPT = [1000 + i for i in range(200)]


async def complete(url: str, key: str) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=60) as client:
        return await client.post(
            f"{url}/v1/completions", headers={"authorization": f"Bearer {key}"},
            json={"model": "SmolLM2-135M-Instruct", "prompt": PROMPT, "max_tokens": 1})


async def cached_tokens(url: str, key: str) -> int:
    answer = await complete(url, key)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_two_gateways_keep_tenants_apart_and_agree_on_their_keys_and_limits(
    smollm2: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    one, two = (new_key(file, {"tenant": tenant}) for tenant in ("one", "two"))
    env = {"SHOAL_GATEWAY_API_KEY_FILE": str(file), "SHOAL_GATEWAY_API_KEY_RELOAD_S": "0.2"}
    with RunningStack(tmp_path, model=str(smollm2), runner="mock-hash", kvstore=0, gateway=2, env=env) as stack:
        first, second = (f"http://{stack.service(f'gateway-{i}').address}" for i in range(2))
        assert await cached_tokens(first, one) == 0
        assert await cached_tokens(second, one) > 0, "both gateways salt a tenant alike"
        for url in (first, second):
            assert (await complete(url, "no-such-key")).status_code == 401
        assert await cached_tokens(second, two) == 0, "the same prompt of another tenant"
        assert await cached_tokens(first, two) > 0

        limited = new_key(file, {"tenant": "three", "requests_per_minute": "3"})
        async with asyncio.timeout(30):
            for url in (first, second):
                while (await complete(url, limited)).status_code == 401:
                    await asyncio.sleep(0.1)
        assert [(await complete(url, limited)).status_code for url in (first, second, first)] == [200, 429, 429]
