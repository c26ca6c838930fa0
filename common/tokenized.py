"""The wire-free words between whoever has text and the tokenizer service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class HashSpec:
    """What a prompt's block hashes are bound to: the worker's fingerprint plus adapter and tenant salt."""

    model: str
    revision: str
    dtype: str
    block_size: int
    adapter: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A validated conversation for the model's own template. Content is text: parts are already joined."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tokenized:
    """`block_hashes` has one 16-byte hash per full block, first to last; empty when no spec was given.

    `turn` is for `open_text` of an answer to this prompt, as it is: with it the answer keeps its exact ids when the
    chat comes back.
    """

    token_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...] = ()
    token_strings: tuple[str, ...] = ()
    turn: bytes = b""


@dataclass(frozen=True, slots=True)
class ModelText:
    """What a model's tokenizer says of itself."""

    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: str
    tool_chat_template: str = ""  # for chats with tools, where the model has another


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one stream. At a stop string `num_tokens` counts up to the token that completed it."""

    text: str
    num_tokens: int  # consumed so far
    matched_stop: str | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True)
class TokenText:
    """What one token id stands for. Its bytes may be part of a character; an id without a token has none."""

    raw: bytes
    is_special: bool = False  # left out of text with skip_special_tokens


class TextStream(Protocol):
    """Token ids of one choice in, text out. Joined deltas equal the text of the whole, byte for byte."""

    async def push(self, token_ids: Sequence[int]) -> TextDelta: ...

    async def finish(self, token_ids: Sequence[int] = ()) -> TextDelta:
        """The last tokens, if there are any left: their text and what was held back."""

    def close(self) -> None:
        """Forget the stream; allowed in every state."""


class TokenizerPort(Protocol):
    """The tokenizer service as its callers see it. Survives the loss of a replica within the deadline."""

    async def tokenize_text(
        self, model: str, text: str, *, add_special_tokens: bool = True, hash_spec: HashSpec | None = None,
        token_strings: bool = False,
    ) -> Tokenized: ...

    async def tokenize_chat(
        self, model: str, prompt: ChatPrompt, *, hash_spec: HashSpec | None = None, token_strings: bool = False
    ) -> Tokenized: ...

    async def check_tokens(
        self, model: str, token_ids: Sequence[int], *, hash_spec: HashSpec | None = None
    ) -> Tokenized:
        """Validate ids against the vocabulary and hash them. Raises `InvalidRequest` for one outside it."""

    async def decode(self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    async def token_texts(self, model: str, token_ids: Sequence[int]) -> list[TokenText]:
        """Of each id by itself. Raises `InvalidRequest` for one outside the vocabulary."""

    async def describe(self, model: str) -> ModelText: ...

    def open_text(
        self, model: str, *, stop: Sequence[str] = (), include_stop: bool = False, skip_special_tokens: bool = True,
        turn: bytes = b"",
    ) -> TextStream: ...
