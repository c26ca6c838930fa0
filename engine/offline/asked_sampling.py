"""Sampling as a Python user writes it, with vLLM's field names and defaults."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from common.sampling_params import SamplingParams as EngineParams
from common.text.model_tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of these constrains the output. `grammar` is Lark in llguidance's dialect."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def to_grammar(self) -> Grammar:
        """Raises `InvalidRequest` unless exactly one is set."""
        given = {name: value for name in ("json", "regex", "choice", "grammar", "json_object")
                 if (value := getattr(self, name)) not in (None, False)}
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs: exactly one kind must be set, got {', '.join(given) or 'none'}",
                param="structured_outputs")
        ((name, value),) = given.items()
        match name:
            case "json":
                return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))
            case "regex":
                return Grammar(GrammarKind.REGEX, value)
            case "choice":
                return Grammar(GrammarKind.CHOICE, json.dumps(list(value)))
            case "grammar":
                return Grammar(GrammarKind.LARK, value)
        return Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """`stop` strings end the text before them. `seed` None draws one for each request, so runs differ."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as the context leaves
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def to_engine(self, tokenizer: ModelTokenizer, room: int) -> EngineParams:
        """For a prompt that leaves `room` tokens of context. Raises `InvalidRequest` naming the field."""
        return EngineParams(
            max_tokens=max(1, room) if self.max_tokens is None else self.max_tokens, temperature=self.temperature,
            top_k=max(0, self.top_k), top_p=self.top_p, min_p=self.min_p,
            seed=secrets.randbits(64) if self.seed is None else self.seed, ignore_eos=self.ignore_eos, n=self.n,
            stop_token_ids=tuple(self.stop_token_ids or ()), logit_bias=dict(self.logit_bias or {}),
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty, min_tokens=self.min_tokens, logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=_spellings(self.bad_words or (), tokenizer),
            grammar=self.structured_outputs.to_grammar() if self.structured_outputs else None)


def _spellings(words: Sequence[str], tokenizer: ModelTokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word as it stands at the start of a text, and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(found)
