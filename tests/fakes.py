"""Stand-ins for the gateway's two ports: a tokenizer of bytes and decode workers that follow a script."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import InvalidRequest, ShoalError
from common.generation import FinishReason, Generation, ModelFacts, TokenDelta, TokenLogprobs, WorkerView
from common.service_record import Fingerprint
from common.text.stop_matcher import StopMatcher
from common.tokenized import ChatPrompt, HashSpec, ModelText, TextDelta, Tokenized, TokenText

EOS = 256  # ids below are bytes
VOCAB_SIZE = 257
MODEL = "org/tiny"
FINGERPRINT = Fingerprint(MODEL, "r1", "float32", 16, 2, 1, 8)

Step = Sequence[int] | asyncio.Event | ShoalError | TokenDelta
Script = Callable[[str, Generation], list[Step]]


class FakeTokenizer:
    """Token ids are the UTF-8 bytes of the text; a conversation reads `role:content` line by line."""

    def __init__(self) -> None:
        self.prompts: list[ChatPrompt] = []
        self.specs: list[HashSpec | None] = []
        self.hold: asyncio.Event | None = None  # tokenizing waits for it
        self.num_texts_asked = 0
        self.num_id_prompts = 0

    async def tokenize_text(
        self, model: str, text: str, *, add_special_tokens: bool = True, hash_spec: HashSpec | None = None,
        token_strings: bool = False,
    ) -> Tokenized:
        if self.hold is not None:
            await self.hold.wait()
        self.specs.append(hash_spec)
        return _tokenized(list(text.encode()), hash_spec, token_strings)

    async def tokenize_chat(
        self, model: str, prompt: ChatPrompt, *, hash_spec: HashSpec | None = None, token_strings: bool = False
    ) -> Tokenized:
        self.prompts.append(prompt)
        text = "\n".join(f"{m['role']}:{m['content']}" for m in prompt.messages)
        return await self.tokenize_text(model, text, hash_spec=hash_spec, token_strings=token_strings)

    async def check_tokens(
        self, model: str, token_ids: Sequence[int], *, hash_spec: HashSpec | None = None
    ) -> Tokenized:
        self.num_id_prompts += 1
        for token_id in token_ids:
            if not 0 <= token_id < VOCAB_SIZE:
                raise InvalidRequest(f"prompt: token id {token_id} is outside the vocabulary", param="prompt")
        return _tokenized(token_ids, hash_spec, False)

    async def decode(self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(t for t in token_ids if t != EOS).decode("utf-8", "replace")

    async def token_texts(self, model: str, token_ids: Sequence[int]) -> list[TokenText]:
        self.num_texts_asked += len(token_ids)
        return [TokenText(bytes([i]) if i != EOS else b"<eos>", i == EOS) for i in token_ids]

    async def describe(self, model: str) -> ModelText:
        return ModelText(model, VOCAB_SIZE, (EOS,), None, "")

    def open_text(
        self, model: str, *, stop: Sequence[str] = (), include_stop: bool = False, skip_special_tokens: bool = True,
        turn: bytes = b"",
    ) -> FakeText:
        return FakeText(stop, include_stop)


class FakeText:
    """`common.tokenized.TextStream` over byte tokens."""

    def __init__(self, stop: Sequence[str], include_stop: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stop, include_stop=include_stop) if stop else None
        self._num_tokens = 0

    async def push(self, token_ids: Sequence[int]) -> TextDelta:
        await asyncio.sleep(0)
        if self._matcher is None:
            self._num_tokens += len(token_ids)
            return TextDelta(self._decoder.decode(bytes(t for t in token_ids if t != EOS)), self._num_tokens)
        text = ""
        for token_id in token_ids:
            self._num_tokens += 1
            text += self._matcher.feed(self._decoder.decode(bytes([token_id]) if token_id != EOS else b""))
            if self._matcher.matched is not None:
                return TextDelta(text, self._num_tokens, self._matcher.matched, True)
        return TextDelta(text, self._num_tokens)

    async def finish(self, token_ids: Sequence[int] = ()) -> TextDelta:
        last = await self.push(token_ids)
        if last.finished:
            return last
        tail = self._decoder.decode(b"", True)
        if self._matcher:
            tail = self._matcher.feed(tail) + self._matcher.finish()
        matched = self._matcher.matched if self._matcher else None
        return TextDelta(last.text + tail, self._num_tokens, matched, True)

    def close(self) -> None:
        pass


def says(text: str, *, per_step: int = 1) -> Script:
    """A worker that emits the bytes of `text`, then ends; `max_tokens` cuts it."""
    raw = list(text.encode())
    return lambda _worker, _generation: [raw[i : i + per_step] for i in range(0, len(raw), per_step)]


@dataclass
class FakeDecode:
    """`common.generation.DecodePort`: each generation follows `script(worker_id, generation)`.

    A step is token ids, an event to wait for, an error to raise, or a whole delta. After the last step comes the end
    of sequence; `max_tokens` ends a script early. `aborted` has the ids of iterators closed before their end. Several
    choices follow the script, each with its `choice`, step by step in turn.
    """

    script: Script = field(default_factory=lambda: says("hello"))
    workers_: list[WorkerView] = field(default_factory=lambda: [
        WorkerView("w0", MODEL, FINGERPRINT, 512, 8, num_free_blocks=9)])
    max_model_len: int = 512
    names: tuple[str, ...] = (MODEL,)
    generations: list[Generation] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    num_tokens_sent: int = 0

    def models(self) -> list[ModelFacts]:
        return [ModelFacts(name, self.max_model_len, 1_700_000_000) for name in self.names]

    def workers(self, model: str) -> list[WorkerView]:
        return list(self.workers_)

    async def wait_for_workers(self, model: str, timeout_s: float) -> list[WorkerView]:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self.workers_ and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        return self.workers(model)

    async def generate(self, worker_id: str, generation: Generation) -> AsyncGenerator[TokenDelta, None]:
        self.generations.append(generation)
        self.placed.append(worker_id)
        ended, num_open = False, generation.params.n
        try:
            async for delta in self._follow(worker_id, generation):
                num_open -= delta.finish_reason is not None
                ended = num_open == 0 or delta.error is not None
                self.num_tokens_sent += len(delta.token_ids)
                yield delta
        except ShoalError:
            ended = True
            raise
        finally:
            if not ended:
                self.aborted.add(generation.request_id)

    async def _follow(self, worker_id: str, generation: Generation) -> AsyncGenerator[TokenDelta, None]:
        num_choices = generation.params.n
        choices = range(num_choices) if num_choices > 1 else (generation.choice,)
        streams = [self._choice(worker_id, replace(generation, choice=choice)) for choice in choices]
        while streams:
            for stream in list(streams):
                delta = await anext(stream, None)
                if delta is None:
                    streams.remove(stream)
                else:
                    yield delta

    async def _choice(self, worker_id: str, generation: Generation) -> AsyncGenerator[TokenDelta, None]:
        params = generation.params
        left = params.max_tokens - len(generation.output_token_ids)
        facts: dict[str, Any] = {"num_prompt_tokens": len(generation.prompt_token_ids), "choice": generation.choice,
                                 "num_cached_tokens": 16 * len(generation.block_hashes)}
        if params.prompt_logprobs is not None and not generation.choice and not generation.output_token_ids:
            facts["prompt_logprobs"] = (None, *(
                fake_logprobs(i, params.prompt_logprobs) for i in generation.prompt_token_ids[1:]))
        for step in self.script(worker_id, generation):
            await asyncio.sleep(0)
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, ShoalError):
                raise step
            elif isinstance(step, TokenDelta):
                yield step
            else:
                ids = tuple(step)[:left]
                left -= len(ids)
                yield TokenDelta(generation.request_id, ids, None if left else FinishReason.LENGTH,
                                 logprobs=_scores(ids, params.logprobs), **facts)
                facts.pop("prompt_logprobs", None)
                if not left:
                    return
        yield TokenDelta(generation.request_id, (EOS,), FinishReason.STOP, stop_token_id=EOS,
                         logprobs=_scores((EOS,), params.logprobs), **facts)


def fake_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The token is the likeliest but one: before it stands the id below."""
    ids = tuple((token_id - 1 + i) % VOCAB_SIZE for i in range(num_top))
    return TokenLogprobs(-0.5 - token_id / 1000, ids, tuple(-0.1 * (i + 1) for i in range(num_top)))


def _scores(ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    return () if num_top is None else tuple(fake_logprobs(i, num_top) for i in ids)


def _tokenized(ids: Sequence[int], spec: HashSpec | None, strings: bool) -> Tokenized:
    hashes = tuple(bytes(16) for _ in range(len(ids) // spec.block_size)) if spec else ()
    return Tokenized(tuple(ids), hashes, tuple(chr(i) for i in ids) if strings else ())
