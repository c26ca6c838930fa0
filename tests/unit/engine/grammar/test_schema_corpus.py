from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from common.sampling_params import SamplingParams
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.state import GrammarState
from engine.sampling.batch_sampler import BatchSampler
from tests.factories import planned_row
from tests.schema_corpus import schemas

VOCAB = 49152
ENDS = frozenset((0, 2))
MAX_TOKENS = 90
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> GrammarCompiler:
    return GrammarCompiler(smollm2, VOCAB, ENDS)


class RandomModel:
    """Logits that know nothing of JSON, and lean more and more towards what closes it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pool = np.random.default_rng(0).standard_normal((16, VOCAB)).astype(np.float32) * np.float32(3)
        words = [tokenizer.decode([i], skip_special_tokens=False).strip() for i in range(VOCAB)]
        self._closing = [i for i, word in enumerate(words) if word and set(word) <= set('"]},01')] + sorted(ENDS)
        self._sampler = BatchSampler(ENDS)

    def draw(self, state: GrammarState, seed: int, position: int) -> int:
        words = np.empty(VOCAB // 32, np.uint32)
        state.fill(words)
        logits = self._pool[(seed + position) % 16].copy()
        logits[self._closing] += max(0, position - 8)
        row = planned_row([1], [], output_position=position, params=SamplingParams(max_tokens=1, seed=seed))
        return self._sampler.draw([row], logits[None], [words])[0][0]

    def write(self, state: GrammarState, seed: int, *, takes_forced: bool) -> tuple[list[int], bool]:
        """The output, and whether it came to its end."""
        tokens: list[int] = []
        while not state.is_finished and len(tokens) < MAX_TOKENS:
            run: Sequence[int] = state.forced() if takes_forced else ()
            run = run or (self.draw(state, seed, len(tokens)),)
            state.accept(run)
            tokens += (token for token in run if token not in ENDS)
        return tokens[:MAX_TOKENS], state.is_finished


def test_two_hundred_schemas_give_valid_output_or_a_refusal_and_forced_runs_change_no_token(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    model = RandomModel(tokenizer)
    num_valid = num_refused = 0
    for seed, schema in enumerate(schemas()):
        try:
            state = compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        except InvalidRequest:
            num_refused += 1
            continue
        tokens, is_finished = model.write(state.fork(), seed, takes_forced=False)
        assert model.write(state, seed, takes_forced=True) == (tokens, is_finished)
        if is_finished:
            value = json.loads(tokenizer.decode(tokens))
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)
            num_valid += 1
    assert num_valid >= 165
    assert 10 <= num_refused <= 25
