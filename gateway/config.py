"""Configuration of the gateway."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from common.config import ServiceConfig
from common.host_port import without_brackets
from gateway.cors import origins_of
from gateway.output_parsers import AUTO, REASONING_PARSERS, TOOL_PARSERS

MIN_TOKEN_CHARS = 16


class GatewayConfig(ServiceConfig):
    """The gateway: the OpenAI API over HTTP. `port` is the HTTP port; it has no gRPC port."""

    service: ClassVar[str] = "gateway"
    tls_fields: ClassVar[str] = "ssl_certfile and ssl_keyfile, or tls_cert and tls_key"
    serves_grpc: ClassVar[bool] = False

    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one and registers it")
    api_keys: str = Field(
        "", description="accepted API keys, separated by commas; with none here nor in the file all are let in",
        max_length=65536, repr=False)
    api_key_file: str = Field(
        "", description="file of accepted API keys, plain or as `shoal keys new` writes them; may change at any time")
    api_key_reload_s: float = Field(
        5.0, gt=0, le=3600, description="how often the key file is looked at; SIGHUP has it looked at now")
    rate_limit_on_failure: Literal["allow", "refuse"] = Field(
        "allow", description="requests of a limited tenant while Redis cannot be asked: allow, or refuse with 503")
    rate_limit_timeout_s: float = Field(
        0.2, ge=0.01, le=5, description="how long a request waits for Redis to tell its rate limits")
    cors_origins: str = Field(
        "", max_length=65536, description="origins whose web pages may call this API, separated by commas; *: all")
    admin_port: int = Field(0, ge=0, le=65535, description="HTTP port of the admin endpoints; 0: none")
    admin_host: str = Field("127.0.0.1", description="address of the admin port; loopback by default")
    admin_token: str = Field(
        "", repr=False, description="secret that opens the admin port; empty: only keys with admin=true do")
    ssl_certfile: str = Field("", description="PEM file with the certificate that clients see; empty: tls_cert")
    ssl_keyfile: str = Field("", description="PEM file with the key of ssl_certfile")
    max_concurrent_requests: int = Field(
        512, ge=1, le=100_000, description="choices of all requests in work at once; more get 503 server_is_overloaded")
    overload_retry_after_s: float = Field(
        1.0, gt=0, le=120, description="Retry-After of a request refused for want of room")
    max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, le=1024**3, description="largest request body in bytes; a larger one gets 413")
    max_bodies_at_once: int = Field(
        1024, ge=1, le=100_000, description="request bodies being read at once, beside requests in work; more get 503")
    max_body_bytes_at_once: int = Field(
        256 * 1024 * 1024, ge=1024, le=1024**4, description="bytes of all request bodies being read; beyond that 503")
    body_timeout_s: float = Field(30.0, gt=0, le=3600, description="how long a client may take to send its body")
    request_timeout_s: float = Field(
        600.0, gt=0, le=86400, description="deadline of a whole request; a shorter x-stainless-read-timeout also binds")
    worker_wait_s: float = Field(
        10.0, ge=0, le=600, description="how long a request waits for a first worker of its model, then 503")
    max_placements: int = Field(
        4, ge=1, le=100, description="workers that one request may be sent to, the first included")
    default_max_tokens: int = Field(
        4096, ge=1, description="output limit of a chat that names none (never beyond what the context leaves)")
    prompts_at_once: int = Field(
        32, ge=1, le=10_000, description="prompts of one completions request that run at the same time")
    reasoning_field: Literal["both", "reasoning_content", "reasoning"] = Field(
        "both", description="field of a chat's answer that has the reasoning: clients differ in which they read")
    ping_s: float = Field(15.0, gt=0, le=3600, description="silence in an open stream after which a comment is sent")
    stream_buffer_bytes: int = Field(
        65536, ge=1024, le=2**30, description="unsent bytes kept for a slow reader before its stream waits for it")
    flush_timeout_s: float = Field(
        2.0, gt=0, le=600, description="how long the end of a stream waits for a reader that does not read")
    tool_call_parser: str = Field(
        AUTO, description=f"format of all models' tool calls: {', '.join(TOOL_PARSERS)}; {AUTO}: by the chat template")
    reasoning_parser: str = Field(
        AUTO, description=f"format of all models' reasoning: {', '.join(REASONING_PARSERS)}; {AUTO}: by the template")
    slo_ttft_ms: float = Field(
        2000.0, ge=0, le=3_600_000, description="goodput counts streams whose first content came within this; 0: any")
    slo_tpot_ms: float = Field(
        100.0, ge=0, le=3_600_000, description="and whose mean time per output token is within this; 0: any")
    keep_alive_s: float = Field(75.0, gt=0, le=3600, description="how long an idle client connection is kept")

    @field_validator("tool_call_parser", "reasoning_parser")
    @classmethod
    def _known_parser(cls, name: str, info: ValidationInfo) -> str:
        names = TOOL_PARSERS if info.field_name == "tool_call_parser" else REASONING_PARSERS
        if name not in (AUTO, *names):
            raise ValueError(f"must be {AUTO} or one of {', '.join(names)}")
        return name

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, listed: str) -> str:
        origins_of(listed)
        return listed

    @field_validator("admin_host")
    @classmethod
    def _bare_address(cls, host: str) -> str:
        return without_brackets(host)

    @field_validator("admin_token")
    @classmethod
    def _long_enough(cls, token: str) -> str:
        if token and (len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token):
            raise ValueError(f"must have at least {MIN_TOKEN_CHARS} printable ASCII characters and no space")
        return token

    @field_validator("ssl_keyfile")
    @classmethod
    def _of_a_certificate(cls, key: str, info: ValidationInfo) -> str:
        if key and not info.data.get("ssl_certfile"):
            raise ValueError("needs ssl_certfile, the certificate that it belongs to")
        return key

    @property
    def has_server_tls(self) -> bool:
        return bool(self.http_cert[0])

    @property
    def http_cert(self) -> tuple[str, str]:
        """Files of the certificate that clients see, and of its key; both empty for plain HTTP."""
        return (self.ssl_certfile, self.ssl_keyfile) if self.ssl_certfile else (self.tls_cert, self.tls_key)
