"""Gathers what an engine puts out for one offline request until all its choices have ended.

A choice: open → ended, by the engine or by a stop string in its text, after which the engine's tokens are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.generation import FinishReason, RequestTiming, TokenLogprobs
from common.text.model_tokenizer import ModelTokenizer
from common.text.output_text import OutputText
from engine.offline.asked_sampling import SamplingParams
from engine.offline.request_output import CompletionOutput, Logprob, RequestOutput, described
from engine.outputs import RequestOutput as EngineOutput


class Gathering:
    """One request's choices."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams,
        tokenizer: ModelTokenizer,
    ) -> None:
        """Raises `InvalidRequest` for a bad stop string."""
        self.request_id = request_id
        self._prompt, self._prompt_token_ids = prompt, prompt_token_ids
        self._params, self._tokenizer = params, tokenizer
        self._choices = [_Choice(index, params, tokenizer) for index in range(params.n)]
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self._timing: RequestTiming | None = None
        self._num_cached_tokens = 0

    @property
    def is_finished(self) -> bool:
        return all(choice.is_ended for choice in self._choices)

    def take(self, output: EngineOutput) -> None:
        if output.error is not None:
            raise output.error
        choice = self._choices[output.choice]
        if choice.is_ended:
            return
        self._num_cached_tokens = output.num_cached_tokens
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        if output.choice == 0:
            self._timing = output.timing or self._timing
        choice.take(output)

    def result(self) -> RequestOutput:
        asked = self._params.prompt_logprobs is not None
        return RequestOutput(
            self.request_id, self._prompt, self._prompt_token_ids, self._scored_prompt() if asked else None,
            [choice.result() for choice in self._choices], self.is_finished, self._timing, self._num_cached_tokens)

    def _scored_prompt(self) -> list[dict[int, Logprob] | None]:
        entries: Sequence[TokenLogprobs | None] = self._prompt_logprobs or (None,)
        return [None if entry is None else described(token_id, entry, self._tokenizer)
                for token_id, entry in zip(self._prompt_token_ids, entries, strict=True)]


class _Choice:
    def __init__(self, index: int, params: SamplingParams, tokenizer: ModelTokenizer) -> None:
        self._index, self._params, self._tokenizer = index, params, tokenizer
        self._text = OutputText(
            tokenizer, stop=params.stops, include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens)
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None

    @property
    def is_ended(self) -> bool:
        return self._finish_reason is not None

    def take(self, output: EngineOutput) -> None:
        shown = output.new_token_ids
        if output.stop_token_id is not None and not self._params.include_stop_str_in_output:
            shown = shown[:-1]
        before = len(self._token_ids)
        delta = self._text.push(shown)
        self._pieces.append(delta.text)
        if output.finish_reason is not None and delta.matched_stop is None:
            delta = self._text.finish()
            self._pieces.append(delta.text)
        if delta.matched_stop is not None:
            self._finish_reason, self._stop_reason = FinishReason.STOP, delta.matched_stop
            self._token_ids.extend(output.new_token_ids[: delta.num_tokens - before])
        else:
            self._finish_reason = output.finish_reason
            if output.stop_token_id in (self._params.stop_token_ids or ()):
                self._stop_reason = output.stop_token_id
            self._token_ids.extend(output.new_token_ids)
        self._logprobs.extend(output.logprobs[: len(self._token_ids) - before])

    def result(self) -> CompletionOutput:
        asked = self._params.logprobs is not None
        entries = [described(token_id, entry, self._tokenizer)
                   for token_id, entry in zip(self._token_ids, self._logprobs, strict=False)]
        return CompletionOutput(
            self._index, "".join(self._pieces), self._token_ids,
            sum(entry.logprob for entry in self._logprobs) if asked else None, entries if asked else None,
            self._finish_reason and str(self._finish_reason), self._stop_reason)
