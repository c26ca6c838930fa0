"""One token from one row, the slow and plain way: what the engine's sampler has to agree with.

Python's own numbers and sorting; nothing of the engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from common.sampling_params import SamplingParams

_MASK = (1 << 64) - 1


def changed_logits(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int] = (), outputs: Sequence[int] = (),
    ends: Collection[int] = (), grammar: Collection[int] | None = None,
) -> list[float]:
    """float32 arithmetic, one id after the other."""
    changed = [np.float32(logit) for logit in logits]
    counts = Counter(outputs)
    barred = set() if len(outputs) >= params.min_tokens else set(ends) | set(params.stop_token_ids)
    for word in params.bad_words:
        if tuple(outputs[len(outputs) - len(word) + 1 :]) == word[:-1] and len(outputs) >= len(word) - 1:
            barred.add(word[-1])
    for i in range(len(changed)):
        is_allowed = params.allowed_token_ids is None or i in params.allowed_token_ids
        if i in barred or not is_allowed or (grammar is not None and i not in grammar):
            changed[i] = np.float32(-np.inf)
        changed[i] += np.float32(params.logit_bias.get(i, 0.0))
        if i in counts or i in prompt:
            penalty = np.float32(params.repetition_penalty)
            changed[i] = changed[i] / penalty if changed[i] > 0 else changed[i] * penalty
        changed[i] -= np.float32(params.frequency_penalty) * np.float32(counts[i])
        changed[i] -= np.float32(params.presence_penalty) * np.float32(i in counts)
    return [float(logit) for logit in changed]


def support(logits: Sequence[float], params: SamplingParams) -> list[int]:
    """Sort by probability, ties by id; leave out by min_p; cut at k; cut where the mass reaches p."""
    top = max(logits)
    probs = [math.exp((logit - top) / params.temperature) for logit in logits]
    order = sorted((i for i, prob in enumerate(probs) if prob >= params.min_p), key=lambda i: (-probs[i], i))
    order = order[: params.top_k] if params.top_k else order
    total, mass = math.fsum(probs[i] for i in order), 0.0
    kept: list[int] = []
    for i in order:
        if kept and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += probs[i]
    return kept


def draw(logits: Sequence[float], params: SamplingParams, position: int, choice: int = 0) -> int:
    """The Gumbel-max trick over `support`; logits already changed."""
    scores = _scores(logits, params, position, choice)
    best = max(scores.values())
    return min(i for i, score in scores.items() if score == best)


def margin(logits: Sequence[float], params: SamplingParams, position: int, choice: int = 0) -> float:
    """By how much the drawn token's score is above the next best's."""
    best, second = sorted(_scores(logits, params, position, choice).values())[:-3:-1]
    return best - second


def _scores(logits: Sequence[float], params: SamplingParams, position: int, choice: int) -> dict[int, float]:
    if params.temperature == 0.0:
        return dict(enumerate(logits))
    top = max(logits)
    return {i: (logits[i] - top) / params.temperature + noise(params.seed, choice, position, i)
            for i in support(logits, params)}


def noise(seed: int, choice: int, position: int, token_id: int) -> float:
    key = splitmix(seed + 0x9E3779B97F4A7C15)
    if choice:
        key = splitmix(key + choice * 0x9E3779B97F4A7C15)
    word = splitmix(splitmix(key ^ position) + token_id * 0x9E3779B97F4A7C15)
    return -math.log(-math.log(((word >> 12) + 0.5) * 2.0**-52))


def splitmix(word: int) -> int:
    word &= _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
