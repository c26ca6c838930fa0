"""What a tokenizer replica can be told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from common.config import ServiceConfig


def _model_folders(value: Any) -> Any:
    """`name=folder,name=folder` or a list of such, as a mapping; without `name=` the folder's name is the model's."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, Sequence):
        return value
    folders: dict[str, str] = {}
    for entry in value:
        name, equals, folder = str(entry).strip().partition("=")
        name, folder = (name.strip(), folder.strip()) if equals else (Path(name).name, name)
        if not name or not folder:
            raise ValueError(f"each entry must be name=folder, got {str(entry)!r}")
        if name in folders:
            raise ValueError(f"the model name {name!r} is given twice")
        folders[name] = folder
    return folders


class TokenizerConfig(ServiceConfig):
    """A tokenizer replica: the texts of one or several models; needs no accelerator."""

    service: ClassVar[str] = "tokenizer"

    models: Annotated[dict[str, Path], BeforeValidator(_model_folders)] = Field(
        description="served models, name=folder separated by commas; a folder holds tokenizer.json", min_length=1)
    encode_threads: int = Field(
        2, ge=1, le=256, description="threads that encode, render and decode; half as many more do so for long texts")
    max_queued: int = Field(256, ge=1, le=1 << 16, description="calls that may run or wait; one more is refused")
    max_text_bytes: int = Field(8 << 20, ge=1, le=1 << 25, description="longest text or rendered conversation")
    call_timeout_s: float = Field(30.0, gt=0, le=600, description="limit of a call, time in the queue included")
    render_timeout_s: float = Field(3.0, gt=0, le=600, description="limit of rendering one conversation")
    max_text_streams: int = Field(8192, ge=1, le=1 << 20, description="choices being detokenized; one more is refused")
    segment_cache_bytes: int = Field(
        64 << 20, ge=0, le=1 << 40, description="memory for token ids of chat segments and generated turns, per model")
