"""Generation requests and token deltas on the wire, both ways."""

from __future__ import annotations

from common import rpc
from common.block_hash import HASH_BYTES
from common.clients.router_wire import placement_from, placement_to_proto
from common.errors import InternalError, InvalidRequest
from common.generation import FinishReason, Generation, RequestTiming, TokenDelta, TokenLogprobs
from common.grammar import Grammar, GrammarKind
from common.sampling_params import SamplingParams
from proto import common_pb2, decode_pb2

_FINISH_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP, FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT, FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_FINISH_FROM_PROTO = {number: reason for reason, number in _FINISH_TO_PROTO.items()}
_GRAMMAR_FIELDS = {
    GrammarKind.JSON_SCHEMA: "json_schema", GrammarKind.REGEX: "regex", GrammarKind.LARK: "lark",
    GrammarKind.CHOICE: "choice_json",
}
_GRAMMAR_KINDS = {field: kind for kind, field in _GRAMMAR_FIELDS.items()}


def generation_to_proto(generation: Generation) -> decode_pb2.Submit:
    resumed = generation.output_token_ids or generation.attempt or generation.choice
    return decode_pb2.Submit(
        request_id=generation.request_id, model=generation.model, prompt_token_ids=generation.prompt_token_ids,
        block_hashes=b"".join(generation.block_hashes), params=params_to_proto(generation.params),
        adapter=generation.adapter, cache_salt=generation.cache_salt, timeout_s=generation.timeout_s,
        trace_context=dict(generation.trace_context), priority=generation.priority,
        placement=placement_to_proto(generation.placement) if generation.placement else None,
        resume=decode_pb2.Resume(
            num_prompt_tokens=len(generation.prompt_token_ids), attempt=generation.attempt, choice=generation.choice,
            output_token_ids=[common_pb2.TokenIds(ids=generation.output_token_ids)]) if resumed else None)


def generation_from_proto(submit: decode_pb2.Submit) -> Generation:
    """Raises `InvalidRequest` for a value outside its limits."""
    raw = submit.block_hashes
    if len(raw) % HASH_BYTES:
        raise InvalidRequest(f"block_hashes: {len(raw)} bytes is not a multiple of {HASH_BYTES}", param="block_hashes")
    resumed = submit.resume.output_token_ids
    if len(resumed) > 1:
        raise InvalidRequest(
            f"output_token_ids: of one choice, got those of {len(resumed)}", param="output_token_ids")
    return Generation(
        request_id=submit.request_id, model=submit.model, prompt_token_ids=tuple(submit.prompt_token_ids),
        block_hashes=tuple(raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)),
        params=params_from_proto(submit.params), adapter=submit.adapter, cache_salt=submit.cache_salt,
        timeout_s=submit.timeout_s, trace_context=dict(submit.trace_context),
        placement=placement_from(submit.placement) if submit.HasField("placement") else None,
        output_token_ids=tuple(resumed[0].ids) if resumed else (), attempt=submit.resume.attempt,
        choice=submit.resume.choice, priority=submit.priority)


def params_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    grammar = params.grammar
    return common_pb2.SamplingParams(
        max_tokens=params.max_tokens, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
        seed=params.seed, ignore_eos=params.ignore_eos, stop_token_ids=params.stop_token_ids,
        logit_bias=params.logit_bias, n=params.n, min_p=params.min_p, presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty, repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens, logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=[common_pb2.TokenIds(ids=word) for word in params.bad_words],
        grammar=common_pb2.Grammar(**{_GRAMMAR_FIELDS[grammar.kind]: grammar.text}) if grammar else None)


def params_from_proto(params: common_pb2.SamplingParams) -> SamplingParams:
    """Absent numbers that may not be zero are neutral: senders from before these fields do not set them."""
    return SamplingParams(
        max_tokens=params.max_tokens, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
        seed=params.seed, ignore_eos=params.ignore_eos, stop_token_ids=tuple(params.stop_token_ids),
        logit_bias=dict(params.logit_bias), n=params.n or 1, min_p=params.min_p,
        presence_penalty=params.presence_penalty, frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty or 1.0, min_tokens=params.min_tokens,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        allowed_token_ids=tuple(params.allowed_token_ids) or None,
        bad_words=tuple(tuple(word.ids) for word in params.bad_words),
        grammar=_grammar_from_proto(params.grammar) if params.HasField("grammar") else None)


def _grammar_from_proto(grammar: common_pb2.Grammar) -> Grammar:
    kind = grammar.WhichOneof("kind")
    if kind is None:  # of a newer sender, perhaps: without it the output would be free
        raise InvalidRequest("grammar: of no kind that is known here", param="grammar")
    return Grammar(_GRAMMAR_KINDS[kind], getattr(grammar, kind))


def delta_to_proto(delta: TokenDelta) -> decode_pb2.RequestDelta:
    return decode_pb2.RequestDelta(
        request_id=delta.request_id, token_ids=delta.token_ids,
        finish_reason=_FINISH_TO_PROTO[delta.finish_reason] if delta.finish_reason else (
            common_pb2.FINISH_REASON_UNSPECIFIED),
        error=rpc.error_to_proto(delta.error) if delta.error else None, stop_token_id=delta.stop_token_id,
        num_prompt_tokens=delta.num_prompt_tokens, num_cached_tokens=delta.num_cached_tokens,
        num_output_tokens=delta.num_output_tokens, queue_s=delta.queue_s, choice=delta.choice,
        logprobs=[_logprobs_to_proto(entry) for entry in delta.logprobs],
        prompt_logprobs=[_logprobs_to_proto(entry) for entry in delta.prompt_logprobs[1:] if entry is not None],
        has_prompt_logprobs=bool(delta.prompt_logprobs),
        timing=decode_pb2.RequestTiming(**delta.timing._asdict()) if delta.timing else None)


def delta_from_proto(delta: decode_pb2.RequestDelta) -> TokenDelta:
    finish = _FINISH_FROM_PROTO.get(delta.finish_reason)
    error = rpc.error_from_proto(delta.error) if delta.HasField("error") else None
    if finish is FinishReason.ERROR and error is None:
        error = InternalError("the worker ended the request with an error that it did not name")
    return TokenDelta(
        request_id=delta.request_id, token_ids=tuple(delta.token_ids), finish_reason=finish, error=error,
        stop_token_id=delta.stop_token_id if delta.HasField("stop_token_id") else None,
        num_prompt_tokens=delta.num_prompt_tokens, num_cached_tokens=delta.num_cached_tokens,
        num_output_tokens=delta.num_output_tokens, queue_s=delta.queue_s, choice=delta.choice,
        logprobs=tuple(map(_logprobs_from_proto, delta.logprobs)),
        prompt_logprobs=(None, *map(_logprobs_from_proto, delta.prompt_logprobs)) if (
            delta.has_prompt_logprobs or delta.prompt_logprobs) else (),
        timing=_timing_from_proto(delta.timing) if delta.HasField("timing") else None)


def _logprobs_to_proto(entry: TokenLogprobs) -> decode_pb2.TokenLogprobs:
    return decode_pb2.TokenLogprobs(
        logprob=entry.logprob, top_token_ids=entry.top_token_ids, top_logprobs=entry.top_logprobs)


def _logprobs_from_proto(entry: decode_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(entry.logprob, tuple(entry.top_token_ids), tuple(entry.top_logprobs))


def _timing_from_proto(timing: decode_pb2.RequestTiming) -> RequestTiming:
    return RequestTiming(
        timing.queue_s, timing.prefill_s, timing.decode_s, timing.num_chunks, timing.num_steps,
        timing.num_preemptions)
