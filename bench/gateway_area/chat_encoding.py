"""A growing chat encoded at each of its turns: through the segment cache, and whole by plain `tokenizers`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from tokenizers import Tokenizer

from bench.figures import Figure
from common.errors import InternalError
from common.text.model_tokenizer import ModelTokenizer
from common.tokenized import ChatPrompt
from tokenizer_svc.segment_cache import SegmentCache
from tokenizer_svc.served_models import ServedModels
from tokenizer_svc.turn import Turn

_NUM_TURNS = 20
_USER_WORDS, _ANSWER_WORDS = 40, 160
_NUM_WORDS = 4000  # a chat is written in so many, some of them far more often than others
_MUST = 3.0

Texts = Sequence[str]
Ids = Sequence[int]


def measure(model_path: Path, *, quick: bool) -> list[Figure]:
    """Times of a whole chat of 20 turns, each round with a new chat and an empty cache; medians.

    "text only": the cache knows what it has encoded itself. "answers drawn here": as in the service, it was told the
    ids of each answer. Raises `InternalError` where an id differs from that of the plain encoding.
    """
    model = ServedModels.load({"m": model_path}, max_text_bytes=8 << 20, render_timeout_s=5.0).get("m")
    library = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    wanted = model.segments.cut_tokens
    rounds: list[tuple[float, float, float]] = []
    for seed in range(5 if quick else 25):
        messages = _messages(model.tokenizer, seed)
        texts = [model.template.render(ChatPrompt(messages[: 2 * turn + 1])) for turn in range(_NUM_TURNS)]
        answers = [model.tokenizer.encode(m["content"], add_special_tokens=False) for m in messages[1::2]]
        caches = [SegmentCache("bench", model.tokenizer, model.tokenizer.segmenter(wanted)) for _ in range(2)]
        plain_s, plain = _plainly(library, texts)
        cached_s, cached = _cached(caches[0], texts, ())
        drawn_s, drawn = _cached(caches[1], texts, answers)
        if not plain == cached == drawn:
            raise InternalError(f"chat {seed}: the cached encoding differs from the plain one")
        rounds.append((plain_s, cached_s, drawn_s))
    plain_s, cached_s, drawn_s = map(statistics.median, zip(*rounds, strict=True))
    name, peer = f"chat of {_NUM_TURNS} turns, {len(plain[-1])} tokens", "tokenizers"
    return [
        Figure(f"{name}: text only", 1e3 * cached_s, "ms", peer, 1e3 * plain_s, plain_s / cached_s, _MUST),
        Figure(f"{name}: answers drawn here", 1e3 * drawn_s, "ms", peer, 1e3 * plain_s, plain_s / drawn_s, _MUST),
    ]


def _plainly(library: Tokenizer, texts: Texts) -> tuple[float, list[tuple[int, ...]]]:
    """Without offsets: the fastest call that the library has."""
    started = time.perf_counter()
    made = [tuple(library.encode_batch_fast([text], add_special_tokens=False)[0].ids) for text in texts]
    return time.perf_counter() - started, made


def _cached(cache: SegmentCache, texts: Texts, answers: Sequence[Ids]) -> tuple[float, list[tuple[int, ...]]]:
    """The time of what a detokenizer does to remember an answer is not counted: no prompt waits for it."""
    made, seconds = [], 0.0
    for turn, text in enumerate(texts):
        started = time.perf_counter()
        encoded = cache.encode(text, "")
        seconds += time.perf_counter() - started
        made.append(encoded.token_ids)
        if turn < len(answers):
            cache.remember(Turn.from_wire(encoded.turn), answers[turn], len(text))
    return seconds, made


def _messages(tokenizer: ModelTokenizer, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    words = _words(tokenizer, draw)
    weights = list(accumulate(1 / (rank + 10) for rank in range(len(words))))
    lengths = [_USER_WORDS, _ANSWER_WORDS] * _NUM_TURNS
    return [{"role": "assistant" if index % 2 else "user", "content": _prose(draw, words, weights, length)}
            for index, length in enumerate(lengths)]


def _words(tokenizer: ModelTokenizer, draw: random.Random) -> list[str]:
    """Of the model's own vocabulary, every third one made of two, so that it takes more than one token."""
    strings = map(tokenizer.token_string, range(tokenizer.vocab_size))
    known = [s[1:] for s in strings if len(s) > 2 and s[1:].isascii() and s[1:].isalpha() and s[1:].islower()]
    chosen = draw.sample(known, min(_NUM_WORDS, len(known)))
    return [word + draw.choice(known) if index % 3 == 2 else word for index, word in enumerate(chosen)]


def _prose(draw: random.Random, words: Sequence[str], weights: Sequence[float], num_words: int) -> str:
    chosen = draw.choices(words, cum_weights=weights, k=num_words)
    ends = draw.choices((" ", ", ", ". ", ".\n\n"), weights=(85, 7, 7, 1), k=num_words)
    return "".join(word + end for word, end in zip(chosen, ends, strict=True)).strip()
