"""A request as it is submitted, and the engine's own state of it.

    WAITING ──admit──▶ RUNNING ──finish, abort, error──▶ FINISHED
       ▲                  │
       └─────preempt──────┘         WAITING ──abort, deadline──▶ FINISHED

`num_computed_tokens` is the only progress: the KV of `token_ids[:num_computed_tokens]` is in the request's
blocks. Preemption sets it to 0 and gives the blocks back; the output tokens stay and are computed again like
prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from common.block_hash import BlockHash, HashScheme
from common.errors import FingerprintMismatch, ShoalError
from common.sampling_params import SamplingParams
from engine.outputs import FinishReason, RequestOutput


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What is submitted. `request_id` is unique among the live requests of one engine."""

    request_id: str
    prompt_token_ids: Sequence[int]  # at least one
    params: SamplingParams
    adapter: str = ""
    cache_salt: str = ""  # the tenant's; requests share prefix hits only within one salt
    block_hashes: Sequence[BlockHash] | None = None  # of the prompt's full blocks, as the tokenizer computed them
    deadline: float | None = None  # time.monotonic() seconds


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """One live request. The scheduler writes progress and status, the block manager the block fields."""

    __slots__ = (
        "arrived_at", "block_hashes", "block_ids", "deadline", "first_admitted_at", "num_cached_tokens",
        "num_computed_tokens", "num_preemptions", "num_prompt_tokens", "num_public_blocks", "params", "request_id",
        "root", "status", "token_ids")

    def __init__(self, asked: EngineRequest, scheme: HashScheme, arrived_at: float = 0.0) -> None:
        """Raises `FingerprintMismatch` where `asked.block_hashes` are not those of this engine."""
        self.request_id = asked.request_id
        self.params = asked.params
        self.deadline = math.inf if asked.deadline is None else asked.deadline
        self.arrived_at = arrived_at
        self.first_admitted_at = arrived_at
        self.token_ids = list(asked.prompt_token_ids)  # prompt, then outputs
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # None until the first admission
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.block_ids: tuple[int, ...] = ()  # the block table; replaced, never changed, so that plans may share it
        self.num_public_blocks = 0  # leading blocks whose hash the pool knows
        self.root = scheme.root(asked.adapter, asked.cache_salt)
        self.block_hashes = scheme.chain(self.root, self.token_ids)  # grows as output fills blocks
        if asked.block_hashes is not None:
            _compare(asked.block_hashes, self.block_hashes)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens known but not computed; at least 1 while the request lives."""
        return len(self.token_ids) - self.num_computed_tokens

    def grow_hashes(self, scheme: HashScheme, num_blocks: int) -> None:
        """Make `block_hashes` cover the first `num_blocks` blocks, all of whose tokens are known."""
        size = scheme.block_size
        for index in range(len(self.block_hashes), num_blocks):
            parent = self.block_hashes[-1] if index else self.root
            self.block_hashes.append(scheme.extend(parent, self.token_ids[index * size : (index + 1) * size]))

    def output(
        self, new_token_ids: tuple[int, ...] = (), reason: FinishReason | None = None,
        stop_token_id: int | None = None, error: ShoalError | None = None,
    ) -> RequestOutput:
        """An output with this request's counts as they are now."""
        return RequestOutput(
            self.request_id, new_token_ids, reason, stop_token_id, self.num_prompt_tokens,
            self.num_cached_tokens or 0, self.num_output_tokens, error, self.first_admitted_at - self.arrived_at)


def _compare(sent: Sequence[BlockHash], own: Sequence[BlockHash]) -> None:
    if len(sent) != len(own):
        raise FingerprintMismatch(
            f"block_hashes: {len(sent)} sent, but the prompt has {len(own)} full blocks here", param="block_hashes")
    for index, (theirs, ours) in enumerate(zip(sent, own, strict=True)):
        if theirs != ours:
            raise FingerprintMismatch(
                f"block_hashes[{index}]: {theirs.hex()} sent, {ours.hex()} computed here; key, model, dtype, "
                "block size, adapter or salt differ", param="block_hashes")
