"""Real engines over one loaded model: requests go in, whole answers come out, and what happened on the way is counted.

    EngineRun: NEW ──run──▶ idle ──run──▶ idle …; after each run the ledger is exact and nothing of a request is left
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from common.block_hash import HashScheme
from common.generation import RequestTiming, TokenLogprobs
from common.grammar import Grammar
from engine import block_memory
from engine.arena_swap import ArenaSwap
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.cpu_runner import TorchRunner
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.state import GrammarState
from engine.kv_cache import KvCache
from engine.model_config import ModelConfig
from engine.models.decoder import DecoderModel
from engine.models.decoder_weights import load_decoder
from engine.outputs import EngineStats, FinishReason, RequestOutput
from engine.ragged_batch import RaggedBatch
from engine.request import EngineRequest, sequence_id
from engine.step import UNKNOWN_TOKEN, StepPlan, StepResult
from engine.weights import WeightFolder

LOGPROB_LIMIT = 1e-4  # absolute
LOGITS_LIMIT = 1e-4  # relative to the largest
MAX_STEPS = 5000
CHECK_EVERY = 5  # steps, that the ledger is checked


class LoadedModel:
    """Weights that many engines share. `reference` is transformers' own model of the same folder."""

    def __init__(self, folder: Path, reference: Any, max_len: int) -> None:
        torch.set_num_threads(1)
        self.config = ModelConfig.from_folder(folder)
        self.max_len = max_len
        self.reference = reference
        with WeightFolder(folder) as weights:
            self.decoder = DecoderModel(self.config, load_decoder(self.config.decoder, weights, torch.float32), max_len)
        self.compiler = GrammarCompiler(folder, self.config.vocab_size, self.config.eos_token_ids)

    def grammar_of(self, asked: EngineRequest) -> GrammarState | None:
        return None if asked.params.grammar is None else self.compile(asked.params.grammar)

    def compile(self, grammar: Grammar) -> GrammarState:
        return self.compiler.compile(grammar)

    @torch.inference_mode()
    def reference_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Transformers' logits after each token, [tokens, vocab]."""
        logits: torch.Tensor = self.reference(torch.tensor([list(token_ids)])).logits[0]
        return logits.float()


@dataclass
class Answer:
    """All outputs of one choice in one."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: Exception | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None

    def take(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output came after the last one"
        self.token_ids += output.new_token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason, self.stop_token_id, self.error = output.finish_reason, output.stop_token_id, output.error
        self.num_prompt_tokens, self.num_cached_tokens = output.num_prompt_tokens, output.num_cached_tokens
        self.timing = output.timing or self.timing

    def after(self, num_tokens: int) -> Answer:
        """What is left of it for a request that resumes behind so many tokens."""
        return Answer(self.token_ids[num_tokens:], self.logprobs[num_tokens:], [], self.finish_reason,
                      self.stop_token_id, self.error, self.num_prompt_tokens)


def assert_same(got: Answer, want: Answer, name: object = "") -> None:
    """Exact tokens and ends; logprobs within `LOGPROB_LIMIT`."""
    assert got.token_ids == want.token_ids, name
    assert (got.finish_reason, got.stop_token_id, got.error) == (want.finish_reason, want.stop_token_id, want.error)
    assert got.num_prompt_tokens == want.num_prompt_tokens
    _assert_close(got.logprobs, want.logprobs, name)
    _assert_close(got.prompt_logprobs, want.prompt_logprobs, name)


def _assert_close(
    got: Sequence[TokenLogprobs | None], want: Sequence[TokenLogprobs | None], name: object
) -> None:
    assert [one and one.top_token_ids for one in got] == [one and one.top_token_ids for one in want], name
    for one, other in zip(got, want, strict=True):
        if one is not None and other is not None:
            assert (one.logprob, *one.top_logprobs) == pytest.approx(
                (other.logprob, *other.top_logprobs), abs=LOGPROB_LIMIT), name


class Place(NamedTuple):
    sequence: str
    position: int  # of the token that the logits are for


class SeenRunner(TorchRunner):
    """Keeps the logits that each draw was made from, and counts what plans had in them."""

    def __init__(self, model: DecoderModel, cache: KvCache) -> None:
        super().__init__(model, cache)
        self.logits_at: dict[Place, torch.Tensor] = {}
        self.chunk_sizes: list[int] = []
        self.num_copies = self.num_unknown = self.most_rows = self.num_masked = 0
        self._drawn_from: dict[int, torch.Tensor] = {}

    def launch(self, plan: StepPlan) -> None:
        self.num_copies += len(plan.copies)
        self.num_unknown += sum(row.token_ids[0] == UNKNOWN_TOKEN for row in plan.rows)
        self.num_masked += plan.masks is not None
        self.chunk_sizes += [len(row.token_ids) for row in plan.chunks]
        self.most_rows = max(self.most_rows, plan.num_rows)
        super().launch(plan)

    def collect(self) -> StepResult:
        plan = self._launched[0]
        self._drawn_from = {}
        result = super().collect()
        for index, logits in self._drawn_from.items():
            row = plan.rows[index]
            self.logits_at[Place(row.request_id, row.start + len(row.token_ids))] = logits
        return result

    def _last_logits(self, batch: RaggedBatch, hidden: torch.Tensor) -> torch.Tensor:
        logits = super()._last_logits(batch, hidden)
        for (index, _), row in zip(batch.sampled, logits, strict=True):
            self._drawn_from[index] = row.clone()
        return logits


Answers = dict[tuple[str, int], Answer]


class EngineRun:
    """One engine. `swap_blocks` > 0: preempted sequences may go to an arena of so many blocks.

    The clock stands still, so that no decision depends on how fast the machine is.
    """

    def __init__(self, model: LoadedModel, *, swap_blocks: int = 0, **config: Any) -> None:
        self.model = model
        self.config = EngineConfig(**{"num_blocks": 256, "block_size": 4, "max_model_len": model.max_len} | config)
        scheme = HashScheme(bytes(16), "m", "r", "float32", self.config.block_size)
        cache = KvCache(
            model.config, self.config.num_blocks, self.config.block_size, torch.float32, block_memory.private)
        self.runner = SeenRunner(model.decoder, cache)
        self.core = EngineCore(self.config, self.runner, scheme, clock=lambda: 0.0)
        if swap_blocks:
            self.core.use_swap(ArenaSwap(self.core, swap_blocks * self.core.block_bytes))
        self.asked: dict[str, EngineRequest] = {}
        self.answers: Answers = {}
        self._num_steps = 0

    @property
    def stats(self) -> EngineStats:
        return self.core.stats()

    def run(self, *requests: EngineRequest, gap: int = 0, at: Mapping[int, str] | None = None) -> Answers:
        """Until nothing is left; `gap` steps between arrivals. `at`: step → id of a request to abort then."""
        waiting = list(requests)
        for step in itertools.count():
            while waiting and (gap == 0 or step % gap == 0):
                self.add(waiting.pop(0))
                if gap:
                    break
            if step in (at or {}):
                self._take([output] if (output := self.core.abort((at or {})[step])) else [])
            if not (waiting or self.core.has_work):
                break
            assert step < MAX_STEPS, "the engine does not come to rest"
            self.step()
        self.is_at_rest()
        return self.answers

    def add(self, asked: EngineRequest) -> None:
        self.expect(asked)
        self.core.add(asked, self.model.grammar_of(asked))

    def expect(self, asked: EngineRequest) -> None:
        self.asked[asked.request_id] = asked
        for choice in range(asked.num_choices):
            self.answers[asked.request_id, choice or asked.choice] = Answer()

    def step(self) -> None:
        self._take(self.core.step() if self.core.has_work else [])
        self._num_steps += 1
        if self._num_steps % CHECK_EVERY == 0:
            self.core.check_integrity()

    def is_at_rest(self) -> None:
        self.core.check_integrity()
        stats = self.stats
        assert (stats.num_leaked_blocks, stats.num_running, stats.num_waiting, stats.num_awaiting) == (0, 0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert self.runner.num_sequences == 0
        assert all(answer.finish_reason for answer in self.answers.values())

    def assert_logits_of_transformers(self) -> None:
        """Each draw was made from the logits that transformers has there, teacher forced."""
        num_compared = 0
        for (request_id, choice), answer in self.answers.items():
            asked = self.asked[request_id]
            tokens = [*asked.prompt_token_ids, *asked.output_token_ids, *answer.token_ids]
            want = self.model.reference_logits(tokens)
            name = sequence_id(request_id, 0 if asked.params.n == 1 else choice)
            for position in range(len(asked.prompt_token_ids), len(tokens)):
                got = self.runner.logits_at.get(Place(name, position))
                if got is not None:
                    right = want[position - 1]
                    assert float((got - right).abs().max() / right.abs().max()) < LOGITS_LIMIT, (name, position)
                    num_compared += 1
        assert num_compared

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self.answers[output.request_id, output.choice].take(output)


class AloneAnswers:
    """What each request answers alone, whole, one step after the other: worked out when it is first asked for."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._alone: dict[str, Answer] = {}

    def answer(self, asked: EngineRequest, choice: int = 0) -> Answer:
        alone = replace(asked, choice=choice, output_token_ids=(), priority=0, params=replace(asked.params, n=1))
        key = repr(alone)
        if key not in self._alone:
            run = EngineRun(self.model, num_blocks=64, max_num_batched_tokens=self.model.max_len, max_num_seqs=1,
                            enable_overlap=False, enable_prefix_caching=False)
            answers = run.run(alone)
            run.assert_logits_of_transformers()
            assert (run.runner.num_unknown, run.runner.most_rows) == (0, 1)
            self._alone[key] = answers[asked.request_id, choice]
        return self._alone[key]

    def check(self, run: EngineRun, answers: Answers) -> None:
        """All but strangers. A prompt's logprobs come once for all choices."""
        for (name, choice), got in answers.items():
            if not name.startswith("stranger"):
                want = self.answer(run.asked[name], choice)
                assert_same(got, replace(want, prompt_logprobs=[]) if choice else want, (name, choice))
        run.assert_logits_of_transformers()
