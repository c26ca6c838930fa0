"""What one client asked for, validated and free of HTTP: the pipeline's input and its output.

A call is one order for each of its prompts; an order has `n` choices of one prompt.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from common.errors import InvalidRequest
from common.generation import FinishReason, ModelFacts, TokenLogprobs
from common.grammar import Grammar
from common.sampling_params import SamplingParams
from common.tokenized import ChatPrompt
from gateway.field_types import MAX_PARAM_CHARS
from gateway.word_ids import WordIds

MAX_PROMPT_ENTRIES: Final = 2_000_000  # some 130 MB of JSON


@dataclass(frozen=True, slots=True)
class Order:
    """All choices of one prompt. `request_id` is ours, unique and ordered by time; never the client's."""

    request_id: str
    model: ModelFacts
    prompt: ChatPrompt | str | tuple[int, ...]
    max_tokens: int | None  # None: what the context leaves, capped by configuration; 0: only with echo, no output
    max_tokens_param: str = "max_tokens"  # the field it was sent in, named in errors
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = field(default_factory=lambda: secrets.randbits(64))  # drawn here, so that a retry repeats it
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    logit_bias: dict[int, float] = field(default_factory=dict)
    cache_salt: str = ""
    return_token_ids: bool = False
    n: int = 1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logprobs: int | None = None  # of each output token, and so many alternatives; None: off
    prompt_logprobs: int | None = None  # the same of each prompt token but the first
    echo: bool = False  # completions: the prompt comes before each choice's text
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()  # texts; the pipeline has them tokenized
    grammar: Grammar | None = None
    grammar_param: str = "grammar"  # the field that the grammar was sent in
    grammar_places: Mapping[str, str] = field(default_factory=dict)  # of parts of its schema, by their path in it
    prompt_param: str = "prompt"  # the field that the prompt was sent in
    priority: int = 0  # lower runs first
    affinity_key: str = ""  # requests of one key are placed together where that costs nothing
    truncate_prompt_tokens: int | None = None  # keep only so many of the prompt's last tokens; -1: see Preparation
    tools: ToolUse | None = None  # chat: how the output's tool calls are read; None: it is all content
    reasoning_parser: str = ""  # chat: name of the format that reasoning is read by; empty: none
    include_reasoning: bool = True  # False: what is read as reasoning is not shown
    return_tokens_as_token_ids: bool = False  # token strings of logprobs are `token_id:ID`
    word_ids: WordIds = field(default_factory=WordIds, compare=False, repr=False)  # of the call's bad words
    prompt_entries: PromptEntries = field(default_factory=lambda: PromptEntries(), compare=False)  # of the call

    def sampling_params(self, max_tokens: int, bad_words: tuple[tuple[int, ...], ...] = ()) -> SamplingParams:
        """`bad_words`: this order's as token ids. Raises `InvalidRequest` naming the field as the client sent it."""
        try:
            return SamplingParams(
                max_tokens=max_tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
                seed=self.seed, ignore_eos=self.ignore_eos, stop_token_ids=self.stop_token_ids,
                logit_bias=self.logit_bias, n=self.n, min_p=self.min_p, presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty, repetition_penalty=self.repetition_penalty,
                min_tokens=self.min_tokens, logprobs=self.logprobs, prompt_logprobs=self._prompt_logprobs(),
                allowed_token_ids=self.allowed_token_ids, bad_words=bad_words, grammar=self.grammar)
        except InvalidRequest as error:
            raise self.as_sent(error) from None

    def as_sent(self, error: InvalidRequest) -> InvalidRequest:
        """The same refusal, naming the field as the client sent it."""
        sent = {"max_tokens": self.max_tokens_param, "grammar": self.grammar_param, "prompt": self.prompt_param}
        name = error.param or ""
        if sent.get(name, name) == name:
            return error
        message = error.message.removeprefix(name).removeprefix(":").strip()
        param = sent[name]
        if name == "grammar":
            param, message = self._part_as_sent(param, message)
        return type(error)(f"{param}: {message}", param=param, retry_after_s=error.retry_after_s)

    def _part_as_sent(self, param: str, message: str) -> tuple[str, str]:
        """Where the message has the path of a part of the schema, the field that this part was sent in."""
        for place, sent_in in self.grammar_places.items():
            if found := re.search(rf"(?<!\S){re.escape(place)}(/[^\s:]*)?(?![^\s:])", message):
                path = sent_in + (found[1] or "").replace("/", ".")
                return path[:MAX_PARAM_CHARS], f"{message[: found.start()]}{path}{message[found.end() :]}"
        return param, message

    def count_prompt_entries(self, num_prompt_tokens: int) -> None:
        """Raises `InvalidRequest` where the logprobs of the call's prompts are too many for one answer."""
        echoed = self.logprobs if self.echo else None
        num_each = sum(num + 1 for num in (self.prompt_logprobs, echoed) if num is not None)
        self.prompt_entries.take(
            self.n * num_prompt_tokens * num_each, "logprobs" if self.prompt_logprobs is None else "prompt_logprobs")

    def _prompt_logprobs(self) -> int | None:
        """An echoed prompt shows what is asked of the output."""
        asked = [num for num in (self.prompt_logprobs, self.logprobs if self.echo else None) if num is not None]
        return max(asked, default=None)


@dataclass(slots=True)
class PromptEntries:
    """Logprobs of prompt tokens that the answer of one call has: choices × tokens × (alternatives + 1)."""

    num: int = 0

    def take(self, num: int, param: str) -> None:
        """Raises `InvalidRequest` beyond the limit of a call."""
        self.num += num
        if self.num > MAX_PROMPT_ENTRIES:
            raise InvalidRequest(
                f"{param}: choices × prompt tokens × (alternatives + 1) of a request are at most {MAX_PROMPT_ENTRIES}, "
                f"got {self.num}", param=param)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a chat and how the model may call them. `names` are those of its functions."""

    parser: str  # name of the format that calls are read by
    names: tuple[str, ...]
    is_forced: bool = False  # a grammar sees to it that the output is calls and nothing else
    one_at_most: bool = False  # parallel_tool_calls: false


def new_request_id() -> str:
    """32 hex digits: 48 bits of milliseconds, then 80 random bits (the layout of UUID 7 without its version bits)."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `num_output_tokens` counts up to the token that completed a stop."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one choice. The first may be empty: it says that the worker has begun."""

    text: str
    usage: Usage
    token_ids: tuple[int, ...] = ()  # since the last piece; where ids or logprobs are asked for, all that usage counts
    prompt_token_ids: tuple[int, ...] = ()  # in the first piece only
    fingerprint: str = ""  # of the weights and the KV layout that serve this request
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, where asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # in the first piece only, where asked for
    num_echoed_chars: int = 0  # of the text; in the first piece only


@dataclass(frozen=True, slots=True)
class Ending:
    """The last event of one choice that ended well."""

    finish_reason: FinishReason  # STOP or LENGTH
    stop_reason: str | int | None  # the stop string, or the stop token id the client gave
    usage: Usage  # of all choices of the order so far
    fingerprint: str = ""
    choice: int = 0
    queue_s: float = 0.0  # of the order, at its worker
    ttft_s: float = 0.0  # of the order: received until the first token of any choice came back
