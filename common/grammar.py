"""A constraint on the text of an output, as it travels from the client to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 256 << 10
LENIENT = "x-lenient"  # true in a part of a schema: what of that part cannot be enforced is left out, not refused


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # text: the schema as JSON; `{}` allows any JSON value
    REGEX = "regex"  # Rust syntax; the whole output matches
    LARK = "lark"  # in llguidance's dialect, start rule `start`
    CHOICE = "choice"  # text: a JSON array of strings, one of which is the output


@dataclass(frozen=True, slots=True)
class Grammar:
    """Raises `InvalidRequest` when longer than `MAX_GRAMMAR_BYTES`; whether it makes sense, its compiler says."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if len(self.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"grammar: at most {MAX_GRAMMAR_BYTES} bytes, got {len(self.text.encode())}", param="grammar")
