"""The models a replica serves, by name. Read once at the start, immutable after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import ModelLoadError, ModelNotFound
from common.text.chat_template import ChatTemplate
from common.text.model_tokenizer import ModelTokenizer
from tokenizer_svc.segment_cache import DEFAULT_BYTES, SegmentCache


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model's text side."""

    name: str
    tokenizer: ModelTokenizer
    template: ChatTemplate
    segments: SegmentCache


class ServedModels:
    """Look-up by the name that clients use."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = dict(models)

    @staticmethod
    def load(
        folders: Mapping[str, Path], *, max_text_bytes: int, render_timeout_s: float,
        segment_cache_bytes: int = DEFAULT_BYTES,
    ) -> ServedModels:
        """Raises `ModelLoadError` naming the model and the file at fault."""
        models: dict[str, ServedModel] = {}
        for name, folder in folders.items():
            try:
                tokenizer = ModelTokenizer.load(folder)
                template = ChatTemplate.load(
                    folder, tokenizer.special_tokens, max_chars=max_text_bytes, timeout_s=render_timeout_s)
            except ModelLoadError as error:
                raise ModelLoadError(f"model {name}: {error.message}", param="models") from None
            segments = SegmentCache(
                name, tokenizer, tokenizer.segmenter(_written_by(template, tokenizer)), segment_cache_bytes)
            models[name] = ServedModel(name, tokenizer, template, segments)
        return ServedModels(models)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._models))

    def get(self, name: str) -> ServedModel:
        """Raises `ModelNotFound` naming what is served."""
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(f"model {name!r} is not served by this tokenizer", param="model")
        return model


def _written_by(template: ChatTemplate, tokenizer: ModelTokenizer) -> frozenset[str]:
    """The special tokens that the template names, and those that it gets as variables."""
    strings = map(tokenizer.token_string, tokenizer.special_ids)
    return frozenset({s for s in strings if s in template.source} | set(tokenizer.special_tokens.values()))
