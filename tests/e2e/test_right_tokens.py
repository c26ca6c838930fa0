"""Over HTTP, alone and all at once, the tokens are those of transformers' `generate`: greedy, float32, 64 tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import AsyncOpenAI

from tests.e2e.prompts import CHATS, PLAIN
from tests.stack import RunningStack

NUM_TOKENS = 64
Prompt = str | tuple[dict[str, str], ...]
PROMPTS: tuple[Prompt, ...] = (*CHATS, *PLAIN)


class Answer(NamedTuple):
    token_ids: list[int]
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(tmp_path_factory.mktemp("stack"), model=str(smollm2), runner="torch", mixed=1) as running:
        yield running


def expected_tokens(smollm2: Path) -> list[list[int]]:
    """The oracle: one prompt at a time, its own template, its own generation loop."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    out = []
    for prompt in PROMPTS:
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
        else:
            ids = tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        out.append(made[0, ids.shape[1] :].tolist())
    return out


def client(stack: RunningStack) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=300)


async def ask(openai: AsyncOpenAI, model: str, prompt: Prompt) -> Answer:
    common: dict[str, Any] = {
        "model": model, "max_tokens": NUM_TOKENS, "temperature": 0, "extra_body": {"return_token_ids": True}}
    if isinstance(prompt, str):
        reply: Any = await openai.completions.create(prompt=prompt, **common)
        text = reply.choices[0].text
    else:
        reply = await openai.chat.completions.create(messages=list(prompt), **common)
        text = reply.choices[0].message.content
    return Answer(reply.choices[0].token_ids, text, reply.usage.prompt_tokens,
                  reply.usage.prompt_tokens_details.cached_tokens)


async def ask_streamed(openai: AsyncOpenAI, model: str, prompt: Prompt) -> Answer:
    common: dict[str, Any] = {
        "model": model, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "extra_body": {"return_token_ids": True}}
    if isinstance(prompt, str):
        stream: Any = await openai.completions.create(prompt=prompt, **common)
    else:
        stream = await openai.chat.completions.create(messages=list(prompt), **common)
    ids: list[int] = []
    text, usage = "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += (choice.text if isinstance(prompt, str) else choice.delta.content) or ""
            ids += getattr(choice, "token_ids", None) or []
    assert usage is not None
    return Answer(ids, text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)


def cut_at_end(token_ids: list[int], eos: int = 2) -> list[int]:
    """Up to and without the end-of-sequence token, whether or not it is reported."""
    return token_ids[: token_ids.index(eos)] if eos in token_ids else token_ids


@pytest.mark.timeout(600)
async def test_twenty_prompts_alone_and_at_once_equal_transformers(stack: RunningStack, smollm2: Path) -> None:
    oracle = asyncio.create_task(asyncio.to_thread(expected_tokens, smollm2))
    async with client(stack) as openai:
        alone = [await ask(openai, smollm2.name, prompt) for prompt in PROMPTS]
        together = await asyncio.gather(*(ask_streamed(openai, smollm2.name, prompt) for prompt in PROMPTS))
    for prompt, wanted, one, many in zip(PROMPTS, await oracle, alone, together, strict=True):
        assert cut_at_end(one.token_ids) == cut_at_end(wanted), prompt
        assert cut_at_end(many.token_ids) == cut_at_end(wanted), prompt
        assert many.text.encode() == one.text.encode(), prompt
        assert one.num_prompt_tokens == many.num_prompt_tokens


async def test_a_second_request_reuses_the_prefix_and_draws_the_same_tokens(
    stack: RunningStack, smollm2: Path
) -> None:
    prompt = "The history of the lighthouse began long before " * 12
    async with client(stack) as openai:
        first = await ask(openai, smollm2.name, prompt)
        second = await ask(openai, smollm2.name, prompt)
        longer = await ask(openai, smollm2.name, prompt + "electricity")
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens > 0.8 * second.num_prompt_tokens
    assert 0 < longer.num_cached_tokens < longer.num_prompt_tokens
    assert second.token_ids == first.token_ids


async def test_the_next_turn_of_a_chat_reuses_the_generated_tokens_of_the_last(
    stack: RunningStack, smollm2: Path
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Explain in detail how rain forms, step by step."}]
    async with client(stack) as openai:
        reply = await openai.chat.completions.create(
            model=smollm2.name, messages=messages, max_tokens=48, temperature=0)
        answered = reply.usage.prompt_tokens if reply.usage else 0
        messages += [{"role": "assistant", "content": reply.choices[0].message.content},
                     {"role": "user", "content": "And snow?"}]
        following = await openai.chat.completions.create(
            model=smollm2.name, messages=messages, max_tokens=8, temperature=0)
    assert following.usage is not None
    assert following.usage.prompt_tokens_details is not None
    assert (following.usage.prompt_tokens_details.cached_tokens or 0) >= answered + 16
