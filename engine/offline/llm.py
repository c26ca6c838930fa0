"""`LLM`: one model in this process, for scripts, notebooks and tests of models."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.progress import Progress

from common.errors import InternalError, InvalidRequest, Unavailable
from common.text.chat_template import ChatTemplate
from common.text.model_tokenizer import ModelTokenizer
from common.tokenized import ChatPrompt
from engine.model_engine import ModelEngine
from engine.offline.asked_sampling import SamplingParams
from engine.offline.gathering import Gathering
from engine.offline.request_output import RequestOutput
from engine.outputs import EngineStats
from engine.request import EngineRequest
from engine.worker_config import WorkerConfig

Prompt = str | Mapping[str, Any] | Sequence[int]  # text, {"prompt": text} or {"prompt_token_ids": ids}, or ids
T = TypeVar("T")
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """Loads a model folder; `options` are fields of `engine.worker_config.WorkerConfig`. Not for several threads.

    The shape of this API is vLLM's `LLM`. Batching, prefix cache and sampling are those of the services, because the
    engine is the same.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Raises `ModelLoadError` or `ConfigError` with one clear line."""
        config = WorkerConfig.of(model_path=model, **options)
        name = config.model_name or model
        engine = ModelEngine.load(config, name, secrets.token_bytes(32))
        self._core, self._compiler = engine.core, engine.grammar_compiler
        self._tokenizer = ModelTokenizer.load(model)
        self._template = ChatTemplate.load(model, self._tokenizer.special_tokens)
        self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One result for each prompt, in their order. Any prompt that is refused raises, and nothing runs on."""
        listed = _listed(prompts)
        params = _spread("sampling_params", sampling_params or SamplingParams(), len(listed))
        priorities = _spread("priority", 0 if priority is None else priority, len(listed))
        waiting = [self._request(prompt, asked, priority)
                   for prompt, asked, priority in zip(listed, params, priorities, strict=True)]
        return self._run(waiting, use_tqdm)

    def chat(
        self, messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
        add_generation_prompt: bool = True, continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for conversations through the model's own chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self._template.render(ChatPrompt(
            conversation, tools or (), add_generation_prompt, continue_final_message,  # type: ignore[arg-type]
            chat_template_kwargs or {})) for conversation in conversations]
        ids = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self.generate([{"prompt": text, "prompt_token_ids": i} for text, i in zip(texts, ids, strict=True)],
                             sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> ModelTokenizer:
        return self._tokenizer

    def get_metrics(self) -> EngineStats:
        return self._core.stats()

    def reset_prefix_cache(self) -> int:
        """Forget all cached KV; how many blocks that were."""
        return self._core.reset_prefix_cache()

    def close(self) -> None:
        """Refuse what comes later."""
        self._core.close(Unavailable("the model is closed"))

    def _request(
        self, prompt: Prompt, asked: SamplingParams, priority: int
    ) -> tuple[EngineRequest, Gathering]:
        text, token_ids = self._read(prompt)
        self._num_requests += 1
        request_id = str(self._num_requests)
        params = asked.to_engine(self._tokenizer, self._core.config.max_model_len - len(token_ids))
        gathering = Gathering(request_id, text, token_ids, asked, self._tokenizer)
        return EngineRequest(request_id, token_ids, params, priority=priority), gathering

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt, add_special_tokens=True)
        if not isinstance(prompt, Mapping):
            return None, _checked(prompt)
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), _checked(prompt["prompt_token_ids"])
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], self._tokenizer.encode(prompt["prompt"], add_special_tokens=True)
        raise InvalidRequest("prompts: a mapping needs 'prompt' or 'prompt_token_ids'", param="prompts")

    def _run(self, waiting: list[tuple[EngineRequest, Gathering]], use_tqdm: bool) -> list[RequestOutput]:
        gatherings = [gathering for _, gathering in waiting]
        open_requests: dict[str, Gathering] = {}
        todo = waiting[::-1]
        bar = Progress(transient=True) if use_tqdm else None
        with bar if bar is not None else nullcontext():
            task = bar.add_task("prompts", total=len(waiting)) if bar is not None else None
            try:
                while todo or open_requests:
                    self._add(todo, open_requests)
                    self._step(open_requests)
                    if bar is not None and task is not None:
                        bar.update(task, completed=len(waiting) - len(todo) - len(open_requests))
            finally:
                for request_id in open_requests:
                    self._core.release(request_id)
        return [gathering.result() for gathering in gatherings]

    def _add(self, todo: list[tuple[EngineRequest, Gathering]], open_requests: dict[str, Gathering]) -> None:
        while todo and self._core.stats().num_waiting < self._core.config.max_num_waiting:
            request, gathering = todo.pop()
            self._core.add(request, self._grammar(request))
            open_requests[request.request_id] = gathering

    def _grammar(self, request: EngineRequest) -> Any:
        if request.params.grammar is None:
            return None
        if self._compiler is None:
            raise InvalidRequest("structured_outputs: this model has no tokenizer", param="structured_outputs")
        return self._compiler.compile(request.params.grammar)

    def _step(self, open_requests: dict[str, Gathering]) -> None:
        if not self._core.has_work:
            raise InternalError("requests are open, but the engine has no work")
        for output in self._core.step():
            gathering = open_requests.get(output.request_id)
            if gathering is None:
                continue
            gathering.take(output)
            if gathering.is_finished:  # a choice that ended by its text may still run in the engine
                del open_requests[output.request_id]
                self._core.release(output.request_id)


def _listed(prompts: Any) -> list[Prompt]:
    """A single prompt (text, a mapping, or token ids) as a list of one."""
    is_one = isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int))
    return [prompts] if is_one else list(prompts)


def _checked(token_ids: Sequence[Any]) -> list[int]:
    for token_id in token_ids:
        if type(token_id) is not int:
            raise InvalidRequest(f"prompts: token ids must be integers, got {token_id!r}", param="prompts")
    return list(token_ids)


def _spread(name: str, given: T | Sequence[T], num: int) -> Sequence[T]:
    """One for each prompt."""
    if not isinstance(given, Sequence):
        return [given] * num
    if len(given) != num:
        raise InvalidRequest(f"{name}: {len(given)} given for {num} prompts", param=name)
    return given
