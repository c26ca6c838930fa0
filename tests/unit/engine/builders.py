"""A small engine with a mock runner, and what its tests ask of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common.block_hash import BlockHash, HashScheme
from common.sampling_params import SamplingParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.grammar.state import GrammarState
from engine.mock_runner import MockMode, MockRunner, hashed_token
from engine.outputs import RequestOutput
from engine.request import EngineRequest, sequence_id
from engine.step import StepPlan
from tests.unit.engine.fake_grammar import FakeGrammar

EOS = frozenset({2})
VOCAB_SIZE = 50
SAMPLING_FIELDS = ("ignore_eos", "stop_token_ids", "logit_bias", "n", "logprobs", "prompt_logprobs", "min_tokens")


def scheme(block_size: int = 16) -> HashScheme:
    return HashScheme(key=b"0123456789abcdef", model="m", revision="r", dtype="float32", block_size=block_size)


def ask(request_id: str, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> EngineRequest:
    """A request; sampling fields go to its parameters."""
    sampling = {k: fields.pop(k) for k in SAMPLING_FIELDS if k in fields}
    return EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, **sampling), **fields)


def prompt(num_tokens: int, first: int = 3) -> list[int]:
    """`num_tokens` ordinary ids that differ with `first`."""
    return [3 + (first * 7 + i * (first + 5)) % (VOCAB_SIZE - 3) for i in range(num_tokens)]


def oracle(
    prompt_token_ids: Sequence[int], num_outputs: int, choice: int = 0, grammar: FakeGrammar | None = None,
) -> list[int]:
    """What mode `hash` must answer, computed without any cache; less where the grammar ends, or fails, before."""
    tokens = list(prompt_token_ids)
    state = grammar and grammar.fork()
    for _ in range(num_outputs):
        if state is not None and (state.is_finished or len(state.accepted) == state.max_accepted):
            break
        tokens.append(hashed_token(tokens, VOCAB_SIZE, EOS, choice, state.allowed() if state else None))
        if state is not None:
            state.accept(tokens[-1:])
    return tokens[len(prompt_token_ids):]


def hashes(token_ids: Sequence[int], block_size: int = 16, salt: str = "") -> list[BlockHash]:
    """Of all full blocks."""
    return scheme(block_size).chain(scheme(block_size).root("", salt), token_ids)


class WatchedRunner(MockRunner):
    """Keeps the plans it was given and the ids it was told to forget."""

    def __init__(self, mode: MockMode, **sizes: Any) -> None:
        super().__init__(mode, **sizes)
        self.plans: list[StepPlan] = []
        self.forgotten: list[str] = []
        self.forgotten_before: list[tuple[str, ...]] = []  # per plan: what was forgotten when it came

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.forgotten_before.append(tuple(self.forgotten))
        super().launch(plan)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)
        super().forget(request_id)


class Engine:
    """A core whose ledger and budget are checked after every step, with everything it handed out."""

    def __init__(
        self, mode: MockMode = MockMode.HASH, *, max_kv_events: int = 0, clock: Callable[[], float] = lambda: 0.0,
        poisons: bool = False, **config: Any,
    ) -> None:
        self.config = EngineConfig(**config)
        self.runner = WatchedRunner(
            mode, num_blocks=self.config.num_blocks, block_size=self.config.block_size, vocab_size=VOCAB_SIZE,
            eos_token_ids=EOS, checks_launches=True)
        self.core = EngineCore(
            self.config, self.runner, scheme(self.config.block_size), max_kv_events=max_kv_events, clock=clock)
        self.poisons = poisons  # what stands in blocks that nobody has is overwritten between steps
        self.asked: dict[str, EngineRequest] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}  # by sequence
        self.tokens: dict[str, list[int]] = {}  # by sequence
        self.last: dict[str, RequestOutput] = {}
        self.progress: dict[str, int] = {}  # the newest `num_computed_tokens` of each request

    def add(self, asked: EngineRequest, grammar: GrammarState | None = None) -> None:
        self.core.add(asked, grammar)
        self.expect(asked)

    def expect(self, asked: EngineRequest) -> None:
        """The outputs of a resumed request follow those it brings."""
        self.asked[asked.request_id] = asked
        for name in self.names(asked):
            self.tokens[name] = list(asked.output_token_ids)

    def names(self, asked: EngineRequest) -> list[str]:
        """Of its sequences."""
        return [sequence_id(asked.request_id, choice) for choice in range(asked.num_choices)]

    def write(self, block_ids: Sequence[int], token_ids: Sequence[int], first: int = 0) -> None:
        """Do what a transfer does: write the KV of positions `first ..` of `token_ids` through the block views."""
        size = self.config.block_size
        for position in range(first, len(token_ids)):
            view = self.core.block_view(block_ids[position // size]).cast("i")
            view[position % size] = token_ids[position]

    def read(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens whose KV the blocks hold."""
        slots = [slot for block_id in block_ids for slot in self.core.block_view(block_id).cast("i")]
        return slots[:num_tokens]

    def step(self) -> list[RequestOutput]:
        num_plans = len(self.runner.plans)
        outputs = self.core.step()
        for plan in self.runner.plans[num_plans:]:
            assert plan.num_tokens <= self.config.max_num_batched_tokens
            assert len(plan.rows) <= self.config.max_num_seqs
        for output in outputs:
            self.record(output)
        self.core.check_integrity()
        self.poison()
        return outputs

    def poison(self) -> None:
        """Make a read of what a free block held before an error."""
        if self.poisons:
            pool = self.core._pool
            for block_id in pool._grantable:
                if pool.hash_of(block_id) is None:
                    self.core.block_view(block_id)[:] = b"\xff" * self.core.block_bytes

    def record(self, output: RequestOutput) -> None:
        asked = self.asked.get(output.request_id)
        name = sequence_id(output.request_id, output.choice if asked and asked.num_choices > 1 else 0)
        assert name not in self.last, "an output came after the last one"
        self.outputs.setdefault(name, []).append(output)
        tokens = self.tokens.setdefault(name, [])
        tokens += output.new_token_ids
        assert output.num_output_tokens == len(tokens)
        self.progress[name] = output.num_computed_tokens
        if output.finish_reason is not None:
            self.last[name] = output

    def run(self, *requests: EngineRequest, max_steps: int = 2000) -> dict[str, RequestOutput]:
        """Add the requests and step until nothing is left; the last outputs of all requests so far."""
        for request in requests:
            self.add(request)
        for _ in range(max_steps):
            if not self.core.has_work:
                return self.last
            self.step()
        raise AssertionError(f"still working after {max_steps} steps")
