"""The text of one choice: incremental decoding, then stop strings; a pure function of how it was opened and of tokens.

States: open → (push)* → finished, at a stop string or by `finish`. A finished one answers with no more text.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.text.incremental_decoder import open_decoder
from common.text.model_tokenizer import ModelTokenizer
from common.text.stop_matcher import StopMatcher
from common.tokenized import TextDelta


class OutputText:
    """Joined deltas are the text of the whole up to the first stop string, however the tokens were cut."""

    def __init__(
        self, tokenizer: ModelTokenizer, *, stop: Sequence[str] = (), include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """Raises `InvalidRequest` for a bad stop string."""
        self._decoder = open_decoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop=include_stop) if stop else None
        self._num_tokens = 0
        self._finished = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Text that became certain. At a stop string the rest of the tokens is not counted."""
        if self._finished:
            return self._delta("")
        if self._matcher is None:
            self._num_tokens += len(token_ids)
            return self._delta(self._decoder.push(token_ids))
        return self._push_matching(token_ids, self._matcher)

    def finish(self) -> TextDelta:
        """No more tokens: all that was held back."""
        if self._finished:
            return self._delta("")
        self._finished = True
        tail = self._decoder.finish()
        return self._delta(tail if self._matcher is None else self._matcher.feed(tail) + self._matcher.finish())

    def _push_matching(self, token_ids: Sequence[int], matcher: StopMatcher) -> TextDelta:
        pieces = []
        for token_id in token_ids:
            self._num_tokens += 1
            pieces.append(matcher.feed(self._decoder.push((token_id,))))
            if matcher.matched is not None:
                self._finished = True
                break
        return self._delta("".join(pieces))

    def _delta(self, text: str) -> TextDelta:
        matched = self._matcher.matched if self._matcher is not None else None
        return TextDelta(text, self._num_tokens, matched, self._finished)
