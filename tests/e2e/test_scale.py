"""Under a steady load each service goes from one replica to two and back: no request fails, and both replicas work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from stack.scrape import scrape
from tests.e2e.replicas import Replica
from tests.e2e.streams import prompt, stream
from tests.stack import RunningStack

NUM_CLIENTS = 4
NUM_TOKENS = 6
PAUSE_S = 0.1  # of a client between two requests
SPREAD_S = 30.0
ENV = {
    "SHOAL_DECODE_MOCK_STEP_S": "0.01", "SHOAL_PREFILL_MOCK_STEP_S": "0.01",
    "SHOAL_ROUTER_LOCAL_PREFILL_TOKENS": "16", "SHOAL_ROUTER_HANDOFF_PATIENCE": "1000",
}
SERVED = {  # what grows in a replica with each request that it had a part in
    "tokenizer": "shoal_tokenizer_encoded_tokens_total", "kvstore": "shoal_kvstore_put_blocks_total",
    "router": "shoal_router_decisions_total", "prefill": "shoal_kv_sent_transfers_total",
    "decode": "shoal_engine_requests_total", "gateway": "shoal_gateway_requests_total",
}


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(tmp_path_factory.mktemp("stack"), model=str(smollm2), runner="mock-hash", prefill=1, decode=1,
                      kvstore=1, router=1, env=ENV) as running:
        yield running


class Load:
    """Clients that ask one short request after the other, in turn at all `urls`."""

    def __init__(self, stack: RunningStack) -> None:
        self.urls = [stack.url]
        self.num_asked: Counter[str] = Counter()  # by url
        self.failures: list[Exception | None] = []
        self.num_done = 0
        self._model, self._numbers = stack.model, itertools.count()
        self._stopping = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        clients = [asyncio.create_task(self._ask_on()) for _ in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            self._stopping = True
            await asyncio.gather(*clients)

    async def go_on(self, num_requests: int) -> None:
        wanted = self.num_done + num_requests
        async with asyncio.timeout(SPREAD_S):
            while self.num_done < wanted:
                await asyncio.sleep(0.02)

    async def _ask_on(self) -> None:
        async with contextlib.AsyncExitStack() as opened:
            clients: dict[str, AsyncOpenAI] = {}
            while not self._stopping:
                number = next(self._numbers)
                url = self.urls[number % len(self.urls)]
                if url not in clients:
                    clients[url] = await opened.enter_async_context(
                        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30))
                self.num_asked[url] += 1
                done = await stream(clients[url], self._model, prompt(number, 60), num_tokens=NUM_TOKENS,
                                    salt=f"{id(self)}-{number}")
                self.num_done += 1
                if done.error is not None or done.finish_reason != "length":
                    self.failures.append(done.error)
                await asyncio.sleep(PAUSE_S)


async def asked_no_more(load: Load, metrics_address: str) -> None:
    """Return when what was asked at the second gateway has arrived there; some of it still runs."""
    url = load.urls.pop()
    async with asyncio.timeout(SPREAD_S):
        while True:
            found = scrape(metrics_address)
            arrived = found["shoal_gateway_requests_total"] + found["shoal_gateway_requests_in_flight"]
            if arrived >= load.num_asked[url]:
                break
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", SERVED)
async def test_a_service_goes_from_one_replica_to_two_and_back_without_a_failed_request(
    stack: RunningStack, smollm2: Path, tmp_path: Path, kind: str
) -> None:
    load, counter = Load(stack), SERVED[kind]
    async with load.running():
        await load.go_on(NUM_CLIENTS)
        async with Replica(stack, kind, tmp_path, smollm2, "mock-hash", ENV) as second:
            assert second.record is not None
            if kind == "gateway":  # a client of the API chooses its gateway itself
                load.urls.append(f"http://{second.record.address}")
            before = stack.metrics(f"{kind}-0")[counter]
            async with asyncio.timeout(SPREAD_S):
                while not (scrape(second.record.metrics_address).get(counter, 0) > 2
                           and stack.metrics(f"{kind}-0")[counter] > before + 2):
                    await asyncio.sleep(0.1)
            if kind == "gateway":
                await asked_no_more(load, second.record.metrics_address)
            assert await second.drain() == 0
        before = stack.metrics(f"{kind}-0")[counter]
        await load.go_on(2 * NUM_CLIENTS)
        async with asyncio.timeout(SPREAD_S):
            while stack.metrics(f"{kind}-0")[counter] <= before:
                await asyncio.sleep(0.1)
    assert load.failures == []
