"""Every failure that reaches a caller: few classes, each carries facts, mapped to gRPC and HTTP once.

`code` is the stable machine word (also the OpenAI error code), `param` the dotted path of the field at
fault, `retry_after_s` how long to wait before another try. `wire()` and `from_wire()` are exact inverses,
so that an error raised in a worker is the same error in the gateway.
"""

from __future__ import annotations

from typing import ClassVar


class ShoalError(Exception):
    """Base of all. `http_status` and `openai_type` say how the gateway answers it."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def wire(self) -> dict[str, str]:
        """The facts as flat strings; absent facts are left out."""
        facts = {"code": self.code, "message": self.message}
        if self.param is not None:
            facts["param"] = self.param
        if self.retry_after_s is not None:
            facts["retry_after_s"] = repr(self.retry_after_s)
        return facts


class InvalidRequest(ShoalError):
    """A value the caller sent is wrong; repeating the call cannot help."""

    code, http_status, openai_type, grpc_status = "invalid_value", 400, "invalid_request_error", "INVALID_ARGUMENT"


class ContextLengthExceeded(InvalidRequest):
    """Prompt (and asked output) beyond the model's context; the message names both numbers."""

    code = "context_length_exceeded"


class UnsupportedValue(InvalidRequest):
    """A valid value of the API that this server does not offer."""

    code = "unsupported_value"


class Unauthenticated(ShoalError):
    """No key, or a wrong one."""

    code, http_status, openai_type, grpc_status = "invalid_api_key", 401, "authentication_error", "UNAUTHENTICATED"


class PermissionDenied(ShoalError):
    """A known key that is not for what was asked."""

    code, http_status, openai_type, grpc_status = "permission_denied", 403, "permission_error", "PERMISSION_DENIED"


class ModelNotFound(ShoalError):
    """No worker has ever served this model name."""

    code, http_status, openai_type, grpc_status = "model_not_found", 404, "not_found_error", "NOT_FOUND"


class NotFound(ShoalError):
    """A path or an object that is not there."""

    code, http_status, openai_type, grpc_status = "not_found", 404, "not_found_error", "NOT_FOUND"


class MethodNotAllowed(ShoalError):
    """A route that exists, called with another verb."""

    code, http_status, openai_type, grpc_status = "method_not_allowed", 405, "invalid_request_error", "UNIMPLEMENTED"


class PayloadTooLarge(ShoalError):
    """A body beyond the configured limit."""

    code, http_status, openai_type, grpc_status = "payload_too_large", 413, "invalid_request_error", "OUT_OF_RANGE"


class UnsupportedMediaType(ShoalError):
    """A body that is not declared as JSON."""

    code, http_status, openai_type, grpc_status = (
        "unsupported_media_type", 415, "invalid_request_error", "INVALID_ARGUMENT")


class RateLimited(ShoalError):
    """A tenant has used what it may use for now; always carries `retry_after_s`."""

    code, http_status, openai_type, grpc_status = (
        "rate_limit_exceeded", 429, "rate_limit_error", "RESOURCE_EXHAUSTED")


class Overloaded(ShoalError):
    """A bounded queue is full; always carries `retry_after_s`."""

    code, http_status, openai_type, grpc_status = (
        "server_is_overloaded", 503, "service_unavailable_error", "RESOURCE_EXHAUSTED")


class Unavailable(ShoalError):
    """No live replica could take the call within its deadline."""

    code, http_status, openai_type, grpc_status = (
        "service_unavailable", 503, "service_unavailable_error", "UNAVAILABLE")


class WorkerLost(ShoalError):
    """The worker that held this request is gone and its work could not be resumed."""

    code, http_status, openai_type, grpc_status = "worker_lost", 503, "service_unavailable_error", "ABORTED"


class DeadlineExceeded(ShoalError):
    """The request's own deadline passed."""

    code, http_status, openai_type, grpc_status = "deadline_exceeded", 504, "server_error", "DEADLINE_EXCEEDED"


class Cancelled(ShoalError):
    """The caller went away or asked to stop."""

    code, http_status, openai_type, grpc_status = "cancelled", 499, "server_error", "CANCELLED"


class ReaderTooSlow(ShoalError):
    """The caller does not read its stream, and what waits for it is beyond the bound."""

    code, http_status, openai_type, grpc_status = (
        "reader_too_slow", 408, "invalid_request_error", "RESOURCE_EXHAUSTED")


class FingerprintMismatch(ShoalError):
    """Two parties disagree on model, dtype, KV layout, block size or hash scheme; both values are named."""

    code, http_status, openai_type, grpc_status = "fingerprint_mismatch", 500, "server_error", "FAILED_PRECONDITION"


class InternalError(ShoalError):
    """A fault of ours."""


class ConfigError(ShoalError):
    """A configuration value that stops the start; names the field, the value's source and the limit."""

    code = "bad_config"


class ModelLoadError(ConfigError):
    """A model folder that is missing, broken, or of an architecture or with a field that is not supported."""

    code = "model_load_failed"


def _classes(base: type[ShoalError]) -> list[type[ShoalError]]:
    return [base, *(c for sub in base.__subclasses__() for c in _classes(sub))]


def codes() -> list[str]:
    """Every code there is: the closed set that a metric's label takes its values from."""
    return sorted({cls.code for cls in _classes(ShoalError)})


def from_wire(facts: dict[str, str]) -> ShoalError:
    """The error that `wire()` described; an unknown code becomes `InternalError`."""
    by_code = {c.code: c for c in reversed(_classes(ShoalError))}
    cls = by_code.get(facts.get("code", ""), InternalError)
    retry = facts.get("retry_after_s")
    return cls(facts.get("message", ""), param=facts.get("param"), retry_after_s=float(retry) if retry else None)
