"""Fields of the API that this server knows and does not offer: a neutral value passes, any other is refused.

To ignore such a field silently would answer another question than the one asked. Fields that only label or hint are
accepted and ignored; everything else is unknown, ignored and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import UnsupportedValue
from gateway import metrics

# Field → the values, besides null, that ask for nothing.
_BOTH: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,), "length_penalty": (1,), "logprob_token_ids": ([],), "stop_regex": (),
    "structural_tag": (), "guided_whitespace_pattern": (), "no_stop_trim": (False,), "lora_path": (),
    "input_embeds": (), "prompt_embeds": (), "custom_logit_processor": (), "logits_processors": ([],),
    "kv_transfer_params": (), "return_hidden_states": (False,), "return_token_offsets": (False,),
    "return_prompt_text": (False,), "spaces_between_special_tokens": (True,), "repetition_detection": (),
    "thinking_token_budget": (), "media": ([],),
}
NEUTRAL_IN_CHAT: dict[str, tuple[Any, ...]] = {
    **_BOTH, "echo": (False,), "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],),
    "audio": (), "documents": ([],), "web_search_options": (), "add_special_tokens": (False,),
}
NEUTRAL_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {**_BOTH, "suffix": ("",)}

ACCEPTED = frozenset({
    "user", "metadata", "store", "safety_identifier", "prompt_cache_retention", "prompt_cache_options", "verbosity",
    "prediction", "moderation", "stream_reasoning", "request_id", "rid", "session_params", "stream_interval",
    "return_meta_info", "return_cached_tokens_details", "guided_decoding_backend",
})


def check(extra: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse what is not offered (`UnsupportedValue` with `param`) and count what is not known."""
    for name, value in extra.items():
        if name in neutral:
            if value is not None and not any(_same(value, allowed) for allowed in neutral[name]):
                raise UnsupportedValue(f"{name}: {_offer(neutral[name])}", param=name)
        elif name not in ACCEPTED:
            metrics.UNKNOWN_FIELDS.inc()


def _same(value: Any, allowed: Any) -> bool:
    """Equal as JSON: true is not 1, but 1.0 is."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _offer(allowed: tuple[Any, ...]) -> str:
    if not allowed:
        return "this server does not offer it"
    return "this server offers only " + " or ".join(repr(a) for a in allowed)
