"""What the draws of each row depend on beside its temperature and key, on the device.

A row: plain ──`set`──▶ special ──`clear`──▶ plain. A row with penalties also holds one of the histories, from `set` to
`clear`: how often each id is among its outputs, and whether it is in its prompt.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from common.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from engine.gpu.device_words import DeviceWords, staging
from engine.step import Join
from kernels.adjust_logits import RowChanges
from kernels.token_counts import learn

_NUM_FIELDS = 10
_MAX_END_IDS = 128  # of a model
_MAX_LISTED = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + _MAX_END_IDS
_CAPACITY = 1 << 14
(_TOP_K, _TOP_P, _LIMIT, _REPETITION, _FREQUENCY, _PRESENCE, _MIN_TOKENS, _HISTORY, _NUM_LISTED,
 _NUM_LOGPROBS) = range(_NUM_FIELDS)
_PLAIN = {_TOP_P: 1.0, _LIMIT: 0.0, _REPETITION: 1.0, _FREQUENCY: 0.0, _PRESENCE: 0.0}


class SamplingRows:
    """Of `max_rows` rows; at most `max_histories` of them with penalties, each for 4 bytes an id of the vocabulary."""

    def __init__(self, max_rows: int, vocab_size: int, max_histories: int, device: torch.device) -> None:
        self.max_rows, self.vocab_size, self._device = max_rows, vocab_size, device
        listed_size = max_rows * _MAX_LISTED * 2
        self._words = DeviceWords(_NUM_FIELDS * max_rows + listed_size, _CAPACITY, device)
        fields = self._words.words[: _NUM_FIELDS * max_rows].view(_NUM_FIELDS, max_rows)
        floats = fields.view(torch.float32)
        self.mask_words = -(-vocab_size // 32)
        self.allowed = torch.full((max_rows, self.mask_words), -1, dtype=torch.int32, device=device)
        self.histories = torch.zeros(max_histories, vocab_size, dtype=torch.int32, device=device)
        self.top_ks, self.top_ps, self.num_logprobs = fields[_TOP_K], floats[_TOP_P], fields[_NUM_LOGPROBS]
        self.history_of = fields[_HISTORY]
        self.changes = RowChanges(
            floats[_REPETITION], floats[_FREQUENCY], floats[_PRESENCE], floats[_LIMIT], fields[_MIN_TOKENS],
            self.history_of, self.histories, self.allowed, fields[_NUM_LISTED],
            self._words.words[_NUM_FIELDS * max_rows :].view(max_rows, _MAX_LISTED, 2))
        self._free = list(range(max_histories))[::-1]
        self._held: dict[int, int] = {}  # row → its history
        self._restricted: set[int] = set()  # rows whose `allowed` is not all ones
        for row in range(max_rows):
            self._put_plain(row)
        self.flush()

    @property
    def has_free_history(self) -> bool:
        return bool(self._free)

    def set(self, row: int, join: Join, end_token_ids: frozenset[int]) -> None:
        """All that `join` asks for; a history is free if it needs one."""
        params = join.params
        if not params.is_greedy:
            self._put(_TOP_K, row, min(params.top_k, 2**31 - 1))
            self._words.put_float(_TOP_P * self.max_rows + row, params.top_p)
            limit = -math.log(params.min_p) if params.min_p > 0 else 0.0
            self._words.put_float(_LIMIT * self.max_rows + row, limit if params.min_p < 1.0 else 1e-30)
        self._put(_NUM_LOGPROBS, row, 0 if params.logprobs is None else params.logprobs + 1)
        self._put(_MIN_TOKENS, row, params.min_tokens)
        self._set_listed(row, join, end_token_ids if params.min_tokens else frozenset())
        if params.allowed_token_ids is not None:
            self._set_allowed(row, params.allowed_token_ids)
        if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
            self._words.put_float(_REPETITION * self.max_rows + row, params.repetition_penalty)
            self._words.put_float(_FREQUENCY * self.max_rows + row, params.frequency_penalty)
            self._words.put_float(_PRESENCE * self.max_rows + row, params.presence_penalty)
            self._set_history(row, join)

    def clear(self, row: int) -> None:
        self._put_plain(row)
        if row in self._restricted:
            self.allowed[row].fill_(-1)
            self._restricted.remove(row)
        if (history := self._held.pop(row, None)) is not None:
            self._free.append(history)

    def flush(self) -> None:
        """Send what has changed, in stream order."""
        self._words.flush()

    def _put(self, field: int, row: int, value: int) -> None:
        self._words.put(field * self.max_rows + row, value)

    def _put_plain(self, row: int) -> None:
        for field in (_TOP_K, _MIN_TOKENS, _NUM_LISTED, _NUM_LOGPROBS, _HISTORY):
            self._put(field, row, 0)
        for field, value in _PLAIN.items():
            self._words.put_float(field * self.max_rows + row, value)

    def _set_listed(self, row: int, join: Join, end_token_ids: frozenset[int]) -> None:
        """Ids with a bias; those that also end the output are written as -1 - id."""
        params = join.params
        ends = end_token_ids | set(params.stop_token_ids) if params.min_tokens else frozenset()
        ids = [*params.logit_bias, *sorted(ends - params.logit_bias.keys())]
        first = _NUM_FIELDS * self.max_rows + row * _MAX_LISTED * 2
        for place, token_id in enumerate(ids):
            self._words.put(first + 2 * place, (-1 - token_id) & 0xFFFFFFFF if token_id in ends else token_id)
            self._words.put_float(first + 2 * place + 1, params.logit_bias.get(token_id, 0.0))
        self._put(_NUM_LISTED, row, len(ids))

    def _set_allowed(self, row: int, token_ids: tuple[int, ...]) -> None:
        bits = np.zeros(self.mask_words * 32, np.uint8)
        bits[list(token_ids)] = 1
        held = staging(self.mask_words, dtype=torch.int32, device=self._device)
        held.copy_(torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32)))
        self.allowed[row].copy_(held, non_blocking=True)
        self._restricted.add(row)

    def _set_history(self, row: int, join: Join) -> None:
        history = self._held[row] = self._free.pop()
        self._put(_HISTORY, row, history + 1)
        self.histories[history].zero_()
        held = staging(len(join.token_ids), dtype=torch.int32, device=self._device)
        held.copy_(torch.from_numpy(np.asarray(join.token_ids, dtype=np.int32)))
        learn(self.histories, history, held.to(self._device, non_blocking=True), join.num_prompt_tokens)
