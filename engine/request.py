"""A request as it is submitted, and the engine's own state of each of its choices.

    WAITING ──admit──▶ RUNNING ──finish, abort, error──▶ FINISHED      WAITING, READY ──abort, deadline──▶ FINISHED
      ▲ ▲                │ ▲ └──all KV made (prefill_only)──▶ HELD ──abort, release──▶ FINISHED
      │ └────preempt─────┘ └──a place to run── READY ◀──start── AWAITING_KV ◀──reserve── (new)
      └──────────────────────────preempt─────────┘                │ ▲ └──release──▶ FINISHED
            WAITING ──its blocks come back from a lower tier────────┘
    FORKING ──the prompt's KV is there, a place to run──▶ RUNNING      FORKING ──no KV to share──▶ WAITING

A sequence is one choice of a request; a request with one choice is its own sequence. The further choices of a request
with n > 1 begin as FORKING: they wait for the prompt's KV, which the first choice computes.

`num_computed_tokens` is the only progress: the KV of `token_ids[:num_computed_tokens]` is in the sequence's
blocks, made here by steps that have retired or, while AWAITING_KV, landed from elsewhere. `num_planned_tokens` is what
it will be once all launched steps have retired. Preemption sets both to 0 and gives the blocks back; the output tokens
stay and are computed again like prompt tokens, as are those that a resumed request brings with it.

A `prefill_only` request ends in HELD: nothing is drawn, and its blocks stay until whoever copies them is done. It
has all its blocks from admission on and is never preempted.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from common.block_hash import BlockHash, HashScheme
from common.errors import FingerprintMismatch, ShoalError
from common.generation import RequestTiming, TokenLogprobs
from common.sampling_params import SamplingParams
from engine.grammar.state import GrammarState
from engine.outputs import FinishReason, RequestOutput
from engine.step import Join


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What is submitted. `request_id` is unique among the live requests of one engine."""

    request_id: str
    prompt_token_ids: Sequence[int]  # at least one
    params: SamplingParams
    adapter: str = ""
    cache_salt: str = ""  # the tenant's; requests share prefix hits only within one salt
    block_hashes: Sequence[BlockHash] | None = None  # of the prompt's full blocks, as the tokenizer computed them
    deadline: float | None = None  # time.monotonic() seconds; of no effect while KV is awaited, sent or held
    output_token_ids: Sequence[int] = ()  # drawn by an earlier attempt: they count, and are not put out again
    choice: int = 0  # index of the only choice; with params.n > 1 it is 0 and all choices run
    priority: int = 0  # lower is scheduled first and preempted last
    prefill_only: bool = False  # make the KV of all tokens but the last, draw nothing, keep the blocks until released

    @property
    def num_choices(self) -> int:
        return 1 if self.prefill_only else self.params.n


class RequestStatus(Enum):
    WAITING = auto()  # in the queue, without blocks
    RUNNING = auto()
    AWAITING_KV = auto()  # has all its blocks, which others write
    READY = auto()  # has all its blocks and waits for a place to run
    HELD = auto()  # prefilled; its blocks are being read
    FORKING = auto()  # waits for the prompt's KV of its request's first choice, without blocks of its own
    FINISHED = auto()


class Request:
    """One live sequence. The scheduler writes progress and status, the block manager the block fields."""

    __slots__ = (
        "arrived_at", "block_hashes", "block_ids", "choice", "deadline", "first_admitted_at", "first_drawn_at",
        "grammar", "is_joined", "last_step_id", "num_cached_tokens", "num_chunk_rows", "num_chunks",
        "num_lost_tokens", "num_overtaken", "num_pending_tokens", "num_planned_tokens", "num_preemptions",
        "num_prompt_tokens", "num_public_blocks", "num_saved_blocks", "num_undrawn_outputs", "params", "prefill_only",
        "priority", "prompt_scores", "request_id", "root", "seat", "sequence_id", "status", "token_ids")

    def __init__(
        self, asked: EngineRequest, scheme: HashScheme, arrived_at: float = 0.0, *,
        grammar: GrammarState | None = None, first: Request | None = None, choice: int = 0,
    ) -> None:
        """`first` and `choice` > 0: a further choice beside the first one.

        Raises `FingerprintMismatch` where `asked.block_hashes` are not those of this engine.
        """
        self.request_id = asked.request_id
        self.choice = choice or asked.choice
        self.sequence_id = sequence_id(asked.request_id, choice)
        self.params = asked.params
        self.grammar = grammar
        self.priority = asked.priority
        self.prefill_only = asked.prefill_only
        self.deadline = math.inf if asked.deadline is None else asked.deadline
        self.arrived_at = arrived_at
        self.first_admitted_at: float | None = None
        self.first_drawn_at: float | None = None
        self.token_ids = array("I", asked.prompt_token_ids)  # prompt, then outputs; 4 bytes each, nothing for the GC
        self.token_ids.extend(asked.output_token_ids)
        self.num_prompt_tokens = len(asked.prompt_token_ids)
        self.num_pending_tokens = len(self.token_ids)  # known and not computed; at least 1 between steps
        self.num_planned_tokens = 0  # of no meaning while the decode set has it in a column
        self.num_cached_tokens = 0  # of the prompt, as of the first admission
        self.num_preemptions = 0
        self.num_overtaken = 0  # how often a later one of its class was admitted before it
        self.num_lost_tokens = 0  # computed before the last preemption
        self.num_saved_blocks = 0  # leading full blocks that a lower tier was given at the last preemption
        self.num_chunk_rows = 0  # rows of it that were planned as chunks and have retired
        self.num_chunks = 0  # of them up to the first drawn token
        self.num_undrawn_outputs = len(asked.output_token_ids)  # outputs that no decode row drew
        self.prompt_scores: list[TokenLogprobs] | None = None  # of prompt positions 1 ..; None: not asked for, or out
        if asked.params.prompt_logprobs is not None and not choice and not asked.output_token_ids:
            self.prompt_scores = []
        self.status = RequestStatus.WAITING
        self.is_joined = False  # the runner knows it
        self.last_step_id = 0  # the newest step that may touch its blocks
        self.seat = -1  # written by the decode set
        self.block_ids: tuple[int, ...] = ()  # the block table; replaced, never changed, so that plans may share it
        self.num_public_blocks = 0  # leading blocks whose hash the pool knows
        self.root: BlockHash = first.root if first else scheme.root(asked.adapter, asked.cache_salt)
        self.block_hashes: list[BlockHash] = (  # grows as output fills blocks
            first.block_hashes.copy() if first else scheme.chain(self.root, self.token_ids))
        if asked.block_hashes is not None and first is None:
            _compare(asked.block_hashes, self.block_hashes[: self.num_prompt_tokens // scheme.block_size])

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        # Kept as what is pending: a step that computes one token and draws one then leaves the field as it is.
        return len(self.token_ids) - self.num_pending_tokens

    def set_computed(self, num_tokens: int) -> None:
        """Progress while no launched step has a row of it."""
        self.num_pending_tokens = len(self.token_ids) - num_tokens
        self.num_planned_tokens = num_tokens

    @property
    def num_kv_tokens(self) -> int:
        """Known tokens whose KV is made here: all of them, or all but the last for `prefill_only`."""
        return len(self.token_ids) - self.prefill_only

    @property
    def num_due_tokens(self) -> int:
        """Those of `num_kv_tokens` that are not computed."""
        return self.num_pending_tokens - self.prefill_only

    @property
    def num_unplanned_tokens(self) -> int:
        """Those of `num_kv_tokens` that no launched step computes; not for members of the decode set."""
        return self.num_kv_tokens - self.num_planned_tokens

    @property
    def is_further_choice(self) -> bool:
        """Whether another sequence of its request computes the prompt for it, and counts it."""
        return self.sequence_id != self.request_id

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt logprobs are still to be made: then every prompt token is computed here."""
        return self.prompt_scores is not None

    def set_cached(self, num_tokens: int) -> None:
        """So many leading tokens were found; of them `num_cached_tokens` reports at most the prompt but its last."""
        self.num_cached_tokens = min(num_tokens, self.num_prompt_tokens - 1)

    def append(self, token_id: int) -> None:
        """Take in a token, the next to be computed."""
        self.token_ids.append(token_id)
        self.num_pending_tokens += 1

    def lose_blocks(self) -> None:
        """After a preemption: all KV has to be made, or loaded, again."""
        self.num_lost_tokens = self.num_computed_tokens
        self.num_preemptions += 1
        self.is_joined = False
        self.set_computed(0)
        if self.prompt_scores is not None:
            self.prompt_scores = []

    def grow_hashes(self, scheme: HashScheme, num_blocks: int) -> None:
        """Make `block_hashes` cover the first `num_blocks` blocks, all of whose tokens are known."""
        size, hashes = scheme.block_size, self.block_hashes
        parent = hashes[-1] if hashes else self.root
        for start in range(len(hashes) * size, num_blocks * size, size):
            parent = scheme.extend(parent, self.token_ids[start : start + size])
            hashes.append(parent)

    @property
    def queue_s(self) -> float:
        """Submitted → first admitted; 0 before."""
        return 0.0 if self.first_admitted_at is None else self.first_admitted_at - self.arrived_at

    def join(self) -> Join:
        """What a runner has to know of it, as of now."""
        return Join(self.sequence_id, self.token_ids[:], self.num_prompt_tokens, self.params, self.choice)

    def timing(self, now: float) -> RequestTiming:
        admitted = now if self.first_admitted_at is None else self.first_admitted_at
        drawn = self.first_drawn_at
        return RequestTiming(
            queue_s=admitted - self.arrived_at,
            prefill_s=0.0 if drawn is None else drawn - admitted,
            decode_s=0.0 if drawn is None else now - drawn,
            num_chunks=self.num_chunk_rows if drawn is None else self.num_chunks,
            num_steps=self.num_chunk_rows + self.num_output_tokens - self.num_undrawn_outputs,
            num_preemptions=self.num_preemptions)

    def output(
        self, new_token_ids: tuple[int, ...] = (), reason: FinishReason | None = None,
        stop_token_id: int | None = None, error: ShoalError | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (), prompt_logprobs: tuple[TokenLogprobs | None, ...] = (),
        timing: RequestTiming | None = None,
    ) -> RequestOutput:
        """An output with this sequence's counts as they are now."""
        return RequestOutput(
            self.request_id, new_token_ids, reason, stop_token_id, self.num_prompt_tokens, self.num_cached_tokens,
            self.num_output_tokens, error, self.queue_s, self.num_computed_tokens, self.choice, logprobs,
            prompt_logprobs, timing)


def sequence_id(request_id: str, choice: int) -> str:
    """What the runner knows a choice by."""
    return f"{request_id}#{choice}" if choice else request_id


def _compare(sent: Sequence[BlockHash], own: Sequence[BlockHash]) -> None:
    if len(sent) != len(own):
        raise FingerprintMismatch(
            f"block_hashes: {len(sent)} sent, but the prompt has {len(own)} full blocks here", param="block_hashes")
    for index, (theirs, ours) in enumerate(zip(sent, own, strict=True)):
        if theirs != ours:
            raise FingerprintMismatch(
                f"block_hashes[{index}]: {theirs.hex()} sent, {ours.hex()} computed here; key, model, dtype, "
                "block size, adapter or salt differ", param="block_hashes")
