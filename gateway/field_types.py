"""Types of the fields that request bodies have, and the bounds on what is a list."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic.config import JsonDict

from common.sampling_params import MAX_LOGPROBS

INT32_MAX: Final = 2**31 - 1
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_KEY_CHARS: Final = 512  # of salts and of keys of affinity
MAX_TOKEN_IDS: Final = 1 << 20  # of one prompt
MAX_PARAM_CHARS: Final = 200  # of the path that a refusal names


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE: Final = BeforeValidator(_whole)  # of an int: JSON has one kind of number, 2.0 is 2
Finite = Annotated[float, Field(allow_inf_nan=False)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | Literal[False]  # false: none are asked for
Key = Annotated[str, Field(max_length=MAX_KEY_CHARS)]
# Lists fail at their first bad item and at the first one too many: a body of a million items must cost neither a
# million error objects nor a million items.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]  # the field says how many


def text_bounds(most: int, most_chars: int) -> JsonDict:
    """What the document says of a text or a list of texts, whose bounds are checked as those of the field."""
    return {"maxItems": most, "minLength": 1, "maxLength": most_chars,
            "items": {"minLength": 1, "maxLength": most_chars}}
