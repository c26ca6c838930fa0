"""From an order to what the engine gets: token ids with hashes, and sampling parameters that fit model and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from common.errors import ContextLengthExceeded, InvalidRequest
from common.sampling_params import SamplingParams
from common.tokenized import ChatPrompt, HashSpec, Tokenized, TokenizerPort
from gateway.order import Order


@dataclass(frozen=True, slots=True)
class Prepared:
    prompt: Tokenized
    params: SamplingParams
    echoed: str  # the prompt as text, where it is echoed


class Preparation:
    """Holds no state of its own."""

    def __init__(self, tokenizer: TokenizerPort, default_max_tokens: int) -> None:
        self._tokenizer, self._default_max_tokens = tokenizer, default_max_tokens

    async def prepare(self, order: Order, spec: HashSpec) -> Prepared:
        """Raises `InvalidRequest` that names the field as the client sent it."""
        try:
            prompt = await self._tokenize(order, spec)
            order.count_prompt_entries(len(prompt.token_ids))
            params = await self._params(order, len(prompt.token_ids))
            return Prepared(prompt, params, await self._echoed(order, prompt.token_ids))
        except InvalidRequest as error:
            raise order.as_sent(error) from None

    async def _tokenize(self, order: Order, spec: HashSpec) -> Tokenized:
        keep = self._kept(order)
        if keep is None:
            if isinstance(order.prompt, tuple):
                _check_room(order, len(order.prompt))  # before they go anywhere
            tokenized = await self._encode(order, spec)
        else:
            tokenized = await self._encode(order, None)
            tokenized = await self._tokenizer.check_tokens(
                order.model.name, tokenized.token_ids[-keep:] if keep else (), hash_spec=spec)
        if not tokenized.token_ids:
            raise InvalidRequest("prompt: has no tokens", param="prompt")
        return tokenized

    def _kept(self, order: Order) -> int | None:
        """-1: what the context leaves beside the output limit of a request that names none, at least half of it."""
        if order.truncate_prompt_tokens != -1:
            return order.truncate_prompt_tokens
        context = order.model.max_model_len
        return max(1, context - min(self._default_max_tokens, context // 2))

    async def _encode(self, order: Order, spec: HashSpec | None) -> Tokenized:
        model, prompt = order.model.name, order.prompt
        if isinstance(prompt, ChatPrompt):
            return await self._tokenizer.tokenize_chat(model, prompt, hash_spec=spec)
        if isinstance(prompt, str):
            return await self._tokenizer.tokenize_text(
                model, prompt, add_special_tokens=order.add_special_tokens, hash_spec=spec)
        return await self._tokenizer.check_tokens(model, prompt, hash_spec=spec)

    async def _params(self, order: Order, num_prompt_tokens: int) -> SamplingParams:
        """Within the context and the vocabulary. The engine draws at least one token: with none asked it is dropped."""
        asked = order.max_tokens
        if asked is None:
            max_tokens = max(1, min(order.model.max_model_len - num_prompt_tokens, self._default_max_tokens))
        else:
            max_tokens = 1 if asked == 0 and order.echo else asked
        params = order.sampling_params(max_tokens, await self._bad_words(order))
        _check_room(order, num_prompt_tokens)
        if order.logit_bias or order.stop_token_ids or order.allowed_token_ids or order.bad_words:
            params.check_vocabulary((await self._tokenizer.describe(order.model.name)).vocab_size)
        return params

    async def _bad_words(self, order: Order) -> tuple[tuple[int, ...], ...]:
        """Each as the tokens that begin a text and those that follow a space."""
        texts = list(dict.fromkeys(chain.from_iterable((word, f" {word.lstrip(' ')}") for word in order.bad_words)))
        found = await order.word_ids.of(texts, lambda text: self._word(order.model.name, text))
        return tuple(dict.fromkeys(found))

    async def _word(self, model: str, text: str) -> tuple[int, ...]:
        try:
            made = await self._tokenizer.tokenize_text(model, text, add_special_tokens=False)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"bad_words: {error.message.removeprefix('prompt: ')}", param="bad_words") from None
        return made.token_ids

    async def _echoed(self, order: Order, token_ids: Sequence[int]) -> str:
        if not order.echo:
            return ""
        if isinstance(order.prompt, str) and order.truncate_prompt_tokens is None:
            return order.prompt
        return await self._tokenizer.decode(
            order.model.name, token_ids, skip_special_tokens=order.skip_special_tokens)


def _check_room(order: Order, num_prompt_tokens: int) -> None:
    """Raises `ContextLengthExceeded` if the context does not leave what is asked, or one token."""
    room, asked = order.model.max_model_len - num_prompt_tokens, order.max_tokens
    if room < 1 or (asked is not None and asked > room):
        output = f" and {asked} were asked as output ({order.max_tokens_param})" if asked is not None else ""
        raise ContextLengthExceeded(
            f"the context of this model is {order.model.max_model_len} tokens; the prompt has "
            f"{num_prompt_tokens}{output}",
            param="messages" if isinstance(order.prompt, ChatPrompt) else order.prompt_param)
