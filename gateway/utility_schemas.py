"""What `/openapi.json` says of the answers of everything that does not generate."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

State = Literal["ready", "draining", "not_ready"]


class ErrorFacts(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="dotted path of the field at fault")
    code: str | None


class Error(BaseModel):
    error: ErrorFacts


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="where return_token_strs asked for them")


class Text(BaseModel):
    prompt: str
    text: str = Field(description="the same")


class TokenizerInfo(BaseModel):
    model: str
    max_model_len: int
    vocab_size: int
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    eos_token_ids: list[int] = Field(description="all that end a generation, eos_token_id first")
    chat_template: str | None


class ModelInfo(BaseModel):
    """What no worker has said yet is null."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    has_image_understanding: bool
    has_audio_understanding: bool
    max_model_len: int
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    revision: str | None
    dtype: str | None
    block_size: int | None
    num_workers: int


class WorkerLoad(BaseModel):
    worker_id: str
    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_blocks: int
    num_free_blocks: int


class Load(BaseModel):
    server_load: int = Field(description="requests in work at this gateway")
    max_concurrent_requests: int
    draining: bool
    models: dict[str, list[WorkerLoad]] = Field(description="decode workers as last reported, by model")


class Limits(BaseModel):
    max_concurrent_requests: int
    max_body_bytes: int
    request_timeout_s: float
    default_max_tokens: int


class Service(BaseModel):
    service: str
    service_id: str
    role: str | None
    state: str
    version: str
    models: list[str]
    started_at_unix_s: float


class ServerInfo(BaseModel):
    version: str
    status: State
    models: list[str]
    registry_reachable: bool
    limits: Limits
    services: list[Service]


class Version(BaseModel):
    version: str


class ModelReadiness(BaseModel):
    num_tokenizers: int
    num_decode_workers: int


class Readiness(BaseModel):
    """All but the status only with `?verbose`."""

    status: State
    models: dict[str, ModelReadiness] | None = None
    registry_reachable: bool | None = None
    num_requests: int | None = None
