"""It really hands off: the counters of real processes for a 2,000-token prompt, half of it cached at decode alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

from openai import AsyncOpenAI

from stack.scrape import samples
from tests.stack import RunningStack

BLOCK = 16
BLOCK_BYTES = BLOCK * 4  # of the mock runner
NUM_PROMPT, NUM_CACHED = 2000, 1000
ENV = {
    "SHOAL_ROUTER_LOCAL_PREFILL_TOKENS": str(NUM_CACHED), "SHOAL_ROUTER_HANDOFF_PATIENCE": "1000",
    "SHOAL_DECODE_MOCK_STEP_S": "0.05", "SHOAL_PREFILL_MOCK_STEP_S": "0.05",
}


async def test_only_what_decode_lacks_moves_over_shared_memory_while_prefill_still_computes(
    smollm2: Path, tmp_path: Path
) -> None:
    ids = [1000 + i * 7 % 20_000 for i in range(NUM_PROMPT)]
    with RunningStack(tmp_path, model=str(smollm2), runner="mock-hash", prefill=1, decode=1, kvstore=0, router=1,
                      max_num_batched_tokens=256, env=ENV) as stack:
        async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as openai:
            first = await openai.completions.create(model=stack.model, prompt=ids[:NUM_CACHED], max_tokens=1)
            assert first.usage is not None
            assert stack.metrics("decode-0").get("shoal_kv_transfers_total", 0) == 0, "computed by decode itself"
            await asyncio.sleep(1.5)  # the router hears what decode has cached
            second = await openai.completions.create(model=stack.model, prompt=ids, max_tokens=4)
        decode, prefill = stack.metrics("decode-0"), stack.metrics("prefill-0")
        transports = {s.labels["transport"] for s in samples(stack.service("decode-0").metrics_address or "")
                      if s.name == "shoal_kv_transfer_bytes_total" and s.value}
    had = NUM_CACHED // BLOCK
    lacked = -(-(NUM_PROMPT - 1) // BLOCK) - had  # the tail block with it
    assert decode["shoal_kv_transfer_blocks_total"] == lacked
    assert decode["shoal_kv_transfer_bytes_total"] == lacked * BLOCK_BYTES == prefill["shoal_kv_sent_bytes_total"]
    assert decode["shoal_kv_transfer_overlapped_total"] == 1, "the first block was to land before the last was computed"
    assert decode["shoal_kv_transfer_fallbacks_total"] == 0
    assert transports == {"shm"}
    assert prefill["shoal_kv_sent_computed_tokens_total"] == NUM_PROMPT - 1
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == had * BLOCK
