"""Ids of the segments of one model's prompts: a growing chat encodes only what is new, and its own turns exactly.

**The rule for generated turns.** Encoding the text that a model generated may give other ids than those it drew, and
from there on no block of its KV would be found again. So a segment gets the ids as they were drawn if and only if the
model drew them at this very place: the segment's text is, character for character, the decoded text of the ids (those
of the prompt's last segment, then the drawn ones), the ids of all segments before are those of the prompt they were
drawn for, and the cache salt is the same. Any other segment gets the ids that `tokenizers` gives to the whole text. So
the text that the model sees never depends on what is remembered. (Bytes that are no UTF-8 are U+FFFD in both texts.) A
turn with a cut token inside, or that a stop string ended within a token, is not remembered. What was forgotten, or
drawn at another replica, costs a prefix hit and nothing else.

An entry is one text in one scope (cache salt); tenants share none. States: absent → known (encoded, or drawn, or both)
→ absent, when the least recently used make room.
"""

from __future__ import annotations

import bisect
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from common.metrics import counter, gauge
from common.text.incremental_decoder import ByteDecoder
from common.text.model_tokenizer import ModelTokenizer
from common.text.segments import Segmenter
from tokenizer_svc.turn import MAX_TAIL_IDS, PrefixDigest, Turn, scope_of

DEFAULT_BYTES: Final = 64 << 20
MAX_TURN_IDS: Final = 1 << 14  # what one turn may cost the event loop: some milliseconds
MAX_TURNS_PER_TEXT: Final = 64  # of one text, in different conversations; the oldest goes
_ENTRY_BYTES: Final = 400  # an entry's and its arrays' own, about
_TURN_BYTES: Final = 250

SEGMENT_TOKENS = counter(
    "shoal_tokenizer_segment_tokens_total", "tokens of prompts that were cut, by where their ids came from",
    ["model", "source"])
SEGMENT_BYTES = gauge("shoal_tokenizer_segment_cache_bytes", "memory of cached segments, about", ["model"])

Key = tuple[bytes, str]  # (scope, text)


@dataclass(slots=True)
class _Entry:
    encoded: array[int] | None = None  # as `tokenizers` has it
    drawn: dict[bytes, array[int]] = field(default_factory=dict)  # digest of all ids before → as drawn there
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EncodedText:
    """`turn` is what an answer to this prompt goes on from, on the wire; empty where it cannot be remembered."""

    token_ids: tuple[int, ...]
    turn: bytes = b""


class SegmentCache:
    """Safe from threads; encoding is done outside the lock."""

    def __init__(
        self, name: str, tokenizer: ModelTokenizer, segmenter: Segmenter, max_bytes: int = DEFAULT_BYTES
    ) -> None:
        self._tokenizer, self._segmenter, self._max_bytes = tokenizer, segmenter, max_bytes
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._gauge = SEGMENT_BYTES.labels(name)
        self._counts = {source: SEGMENT_TOKENS.labels(name, source) for source in ("encoded", "cached", "drawn")}

    @property
    def cut_tokens(self) -> tuple[str, ...]:
        """Where prompts are cut; none when that is not proved to be safe for this model."""
        return self._segmenter.cut_tokens

    @property
    def num_bytes(self) -> int:
        """Memory of all entries, about; never above the bound."""
        return self._num_bytes

    def encode(self, text: str, cache_salt: str) -> EncodedText:
        """Raises `InvalidRequest` for text that is not valid Unicode."""
        segments = self._segmenter.cut(text)
        if len(segments) < 2:
            return EncodedText(tuple(self._tokenizer.encode(text, add_special_tokens=False)))
        scope = scope_of(cache_salt)
        entries, num_encoded = self._known(scope, segments)
        ids, prefix, start, num_drawn = array("I"), PrefixDigest(), 0, 0
        for segment in segments:
            entry, start = entries[segment], len(ids)
            drawn = entry.drawn.get(prefix.of(ids, start)) if entry.drawn else None
            if drawn is not None:
                ids.extend(drawn)
                num_drawn += len(drawn)
                continue
            if entry.encoded is None:  # known as drawn elsewhere only
                num_encoded += self._encode_missing(scope, [segment], entries)
            ids.extend(entries[segment].encoded or ())
        self._count(num_encoded, len(ids) - num_encoded - num_drawn, num_drawn)
        return EncodedText(tuple(ids), self._turn(scope, prefix, ids, start, segments[-1]))

    def remember(self, turn: Turn, drawn: Sequence[int], num_chars: int) -> None:
        """What was drawn after a prompt. `num_chars` of its text were given out: less than all after a stop string."""
        ids = self._without_end(drawn)
        ids = self._given_out(ids, num_chars) if len(ids) <= MAX_TURN_IDS else []
        if not ids:
            return
        whole = turn.tail + array("I", ids)
        text = self._decode(whole.tolist())
        if self._segmenter.cut(text) != [text]:  # no prompt can have it as one segment
            return
        with self._lock:
            key = (turn.scope, text)
            entry = self._entries.get(key) or _Entry()
            if entry.encoded != whole:
                self._put_turn(key, entry, turn.before, whole)

    def _known(self, scope: bytes, segments: Sequence[str]) -> tuple[dict[str, _Entry], int]:
        """An entry for each text, and how many ids had to be encoded for that."""
        with self._lock:
            found = {segment: self._touched((scope, segment)) for segment in segments}
        entries = {segment: entry for segment, entry in found.items() if entry is not None}
        missing = [segment for segment, entry in found.items() if entry is None]
        return entries, self._encode_missing(scope, missing, entries) if missing else 0

    def _encode_missing(self, scope: bytes, texts: Sequence[str], entries: dict[str, _Entry]) -> int:
        """Put the entries of the texts, as `tokenizers` has them; how many ids they have."""
        num_ids = 0
        for text, ids in zip(texts, self._tokenizer.encode_each(texts, add_special_tokens=False), strict=True):
            entries[text] = self._put_encoded((scope, text), array("I", ids))
            num_ids += len(ids)
        return num_ids

    def _turn(self, scope: bytes, prefix: PrefixDigest, ids: array[int], start: int, text: str) -> bytes:
        tail = ids[start:]
        if len(tail) > MAX_TAIL_IDS or self._decode(tail.tolist()) != text:
            return b""
        return Turn(scope, prefix.of(ids, start), tail).wire()

    def _without_end(self, drawn: Sequence[int]) -> list[int]:
        ids = list(drawn)
        if ids and ids[-1] in self._tokenizer.special_ids:
            ids.pop()
        return ids

    def _given_out(self, ids: list[int], num_chars: int) -> list[int]:
        """The first of the ids whose text is just what was given out; none when a token reaches beyond it."""
        text = self._decode(ids)
        if len(text) <= num_chars:
            return ids
        end = bisect.bisect_left(range(len(ids) + 1), num_chars, key=lambda count: len(self._decode(ids[:count])))
        return ids[:end] if self._decode(ids[:end]) == text[:num_chars] else []

    def _decode(self, ids: list[int]) -> str:
        table = self._tokenizer.token_bytes
        if table is None:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        decoder = ByteDecoder(table, frozenset())
        return decoder.push(ids) + decoder.finish()

    def _touched(self, key: Key) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def _put_encoded(self, key: Key, ids: array[int]) -> _Entry:
        with self._lock:
            entry = self._entries.get(key) or _Entry()
            if entry.encoded is None:
                entry.encoded = ids
                self._grow(key, entry, 4 * len(ids))
            return entry

    def _put_turn(self, key: Key, entry: _Entry, before: bytes, ids: array[int]) -> None:
        old = entry.drawn.pop(before, None)
        if old is None and len(entry.drawn) >= MAX_TURNS_PER_TEXT:
            old = entry.drawn.pop(next(iter(entry.drawn)))
        entry.drawn[before] = ids
        self._grow(key, entry, 4 * len(ids) + _TURN_BYTES - (0 if old is None else 4 * len(old) + _TURN_BYTES))

    def _grow(self, key: Key, entry: _Entry, num_bytes: int) -> None:
        """Keep the entry, which grew by so much, as the most recent one; the oldest make room. One too big goes."""
        if key not in self._entries:
            num_bytes += _ENTRY_BYTES + sys.getsizeof(key[1])
            self._entries[key] = entry
        self._entries.move_to_end(key)
        entry.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if entry.num_bytes > self._max_bytes // 4:
            self._num_bytes -= self._entries.pop(key).num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        self._gauge.set(self._num_bytes)

    def _count(self, num_encoded: int, num_cached: int, num_drawn: int) -> None:
        for source, number in (("encoded", num_encoded), ("cached", num_cached), ("drawn", num_drawn)):
            self._counts[source].inc(number)
