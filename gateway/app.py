"""The HTTP application: every route, and what is around them: CORS, observer, key guard, rate limits, then routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import REGISTRY
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from common.directory import Directory
from common.errors import InternalError, ShoalError
from common.exposition import OPEN_METRICS, encoder
from common.generation import DecodePort, ModelFacts
from common.placement import RouterPort
from common.tokenized import TokenizerPort
from gateway.admission import Admission
from gateway.answer_schemas import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from gateway.attempts import AttemptLimits
from gateway.auth import KeyGuard
from gateway.chat_request import ChatRequest
from gateway.completion_request import CompletionRequest
from gateway.config import GatewayConfig
from gateway.cors import allow_origins, origins_of
from gateway.errors import FAULT_TEXT, error_response, from_http_exception
from gateway.generation_answer import GenerationAnswer, GenerationDesk
from gateway.goodput import SloLimits
from gateway.model_formats import ModelFormats
from gateway.observation import Observer, observation
from gateway.openapi import body_of, describe, refusals, stream_of
from gateway.pipeline import Pipeline, PipelineLimits
from gateway.readiness import readiness
from gateway.request_body import BodyLimits, BodyReader
from gateway.server_facts import ServerFacts
from gateway.tenants.key_ring import KeyRing
from gateway.tenants.rate_limits import RateLimitGuard, RateLimitStore
from gateway.tenants.tenant import caller_of
from gateway.text_desk import TextDesk
from gateway.text_requests import DetokenizeRequest, TokenizeRequest
from gateway.token_texts import TokenTexts
from gateway.utility_schemas import (
    Load,
    Model,
    ModelInfo,
    ModelList,
    Readiness,
    ServerInfo,
    Text,
    TokenizerInfo,
    Tokens,
    Version,
)


@dataclass(frozen=True, slots=True)
class Ports:
    """What the application is joined to."""

    tokenizer: TokenizerPort
    decode: DecodePort
    router: RouterPort | None  # None: requests are placed by load
    directory: Directory
    limits: RateLimitStore


def build_app(config: GatewayConfig, keys: KeyRing, ports: Ports, admission: Admission, version: str) -> ASGIApp:
    """The whole application, ready to be served."""
    slo = SloLimits(config.slo_ttft_ms / 1000, config.slo_tpot_ms / 1000)
    slo.publish()
    limited = RateLimitGuard(build_routes(config, ports, admission, version), ports.limits, keys.has_tenant,
                             allow_on_failure=config.rate_limit_on_failure == "allow")
    return allow_origins(Observer(KeyGuard(limited, keys), slo), origins_of(config.cors_origins))


def build_routes(config: GatewayConfig, ports: Ports, admission: Admission, version: str) -> FastAPI:
    app = FastAPI(title="shoal", version=version, redirect_slashes=False, docs_url=None, redoc_url=None,
                  telemetry={"tracing": False, "metrics": False, "logs": False})  # our own are all there is
    answer_errors(app)
    pipeline = Pipeline(ports.tokenizer, ports.decode, ports.router, PipelineLimits(
        AttemptLimits(config.worker_wait_s, config.max_placements), config.default_max_tokens))
    formats = ModelFormats(ports.tokenizer, config.tool_call_parser, config.reasoning_parser)
    bodies = BodyReader(BodyLimits(
        config.max_body_bytes, config.body_timeout_s, config.max_bodies_at_once, config.max_body_bytes_at_once,
        config.overload_retry_after_s))
    _add_generation(app, GenerationDesk(pipeline, admission, bodies, config, formats, TokenTexts(ports.tokenizer)))
    _add_text(app, TextDesk(ports.tokenizer, pipeline, admission, bodies, config))
    _add_models(app, pipeline, ports.decode)
    _add_facts(app, pipeline, ServerFacts(
        ports.tokenizer, ports.decode, ports.directory, admission, config, version))
    _add_probes(app, ports, admission, version)
    describe(app)
    return app


def answer_errors(app: FastAPI) -> None:
    """Have every failure answered in our words."""
    app.add_exception_handler(ShoalError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_fault)


def _add_generation(app: FastAPI, desk: GenerationDesk) -> None:
    @app.post("/v1/chat/completions", response_model=ChatCompletion, openapi_extra=body_of(ChatRequest),
              responses=stream_of(ChatCompletionChunk))
    async def chat_completions() -> Response:
        """One reply to a conversation; with `stream: true` as server-sent events."""
        return GenerationAnswer(desk, "chat")

    @app.post("/v1/completions", response_model=Completion, openapi_extra=body_of(CompletionRequest),
              responses=stream_of(CompletionChunk))
    async def completions() -> Response:
        """The continuation of one prompt; with `stream: true` as server-sent events."""
        return GenerationAnswer(desk, "completion")


def _add_text(app: FastAPI, desk: TextDesk) -> None:
    @app.post("/tokenize", response_model=Tokens, openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return _json(await desk.tokenize(request))

    @app.post("/detokenize", response_model=Text, openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return _json(await desk.detokenize(request))


def _add_models(app: FastAPI, pipeline: Pipeline, decode: DecodePort) -> None:
    @app.get("/v1/models", response_model=ModelList)
    async def models(request: Request) -> Response:
        """All models that a worker serves, or has served since this gateway started, and that the key is for."""
        may_use = caller_of(request.scope).may_use
        return _json({"object": "list", "data": [_model_body(m) for m in decode.models() if may_use(m.name)]})

    @app.get("/v1/models/{model_id:path}", response_model=Model, responses=refusals(403, 404))
    async def model(model_id: str, request: Request) -> Response:
        """One model; its id may hold slashes."""
        facts = pipeline.find_model(model_id)
        caller_of(request.scope).check_model(facts.name)
        observation(request.scope).model = facts.name
        return _json(_model_body(facts))


def _add_facts(app: FastAPI, pipeline: Pipeline, facts: ServerFacts) -> None:
    """`model` may be left out where there is only one."""
    def named(model: str | None, request: Request) -> ModelFacts:
        found = pipeline.find_model(model)
        observation(request.scope).model = found.name
        caller_of(request.scope).check_model(found.name)
        return found

    async def load(request: Request) -> Response:
        """Requests in work, and how full the workers are."""
        return _json(facts.load(caller_of(request.scope)))

    async def server_info(request: Request) -> Response:
        """Version, limits and the services that are registered."""
        return _json(facts.server(caller_of(request.scope)))

    async def model_info(request: Request, model: str | None = None) -> Response:
        """What a model is, as its workers and its tokenizer say."""
        return _json(await facts.model(named(model, request)))

    async def tokenizer_info(request: Request, model: str | None = None) -> Response:
        """Special tokens and chat template of a model."""
        return _json(await facts.tokenizer_of(named(model, request)))

    _add_get(app, "/load", load, response_model=Load)
    _add_get(app, "/server_info", server_info, response_model=ServerInfo)
    of_a_model = refusals(400, 403, 404, 503)
    _add_get(app, "/model_info", model_info, response_model=ModelInfo, responses=of_a_model)
    _add_get(app, "/tokenizer_info", tokenizer_info, response_model=TokenizerInfo, responses=of_a_model)


def _add_probes(app: FastAPI, ports: Ports, admission: Admission, version: str) -> None:
    async def alive() -> Response:
        """This process answers."""
        return Response(status_code=200)

    async def ready(request: Request) -> Response:
        """Requests can be taken; with `?verbose` what is there of each dependency."""
        is_ready, report = readiness(ports.directory, ports.decode, admission)
        body = report if "verbose" in request.query_params else {"status": report["status"]}
        return _json(body, 200 if is_ready else 503)

    async def metrics(request: Request) -> Response:
        """Prometheus metrics; OpenMetrics when the Accept header asks for it."""
        caller_of(request.scope).check_sees_all()
        encode, content_type = encoder(request.headers.get("accept", ""))
        return Response(await asyncio.to_thread(encode, REGISTRY), headers={"content-type": content_type})

    async def version_of_server() -> Response:
        """The version of this server."""
        return _json({"version": version})

    for path in ("/health", "/live", "/ping"):
        _add_get(app, path, alive, response_class=Response)
    _add_get(app, "/ready", ready, response_model=Readiness, responses={
        503: {"description": "not ready, or draining", "model": Readiness}})
    _add_get(app, "/metrics", metrics, response_class=PlainTextResponse, responses={
        **refusals(403), 200: {"content": {OPEN_METRICS: {"schema": {"type": "string"}}}}})
    _add_get(app, "/version", version_of_server, response_model=Version)


def _add_get(app: FastAPI, path: str, handler: Callable[..., Any], **described: Any) -> None:
    """GET, and HEAD for those that only want to know whether it is there."""
    app.add_api_route(path, handler, methods=["GET"], **described)
    app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)


def _model_body(facts: ModelFacts) -> dict[str, Any]:
    return {"id": facts.name, "object": "model", "created": facts.created_unix_s, "owned_by": "shoal",
            "root": facts.name, "parent": None, "max_model_len": facts.max_model_len}


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ShoalError)
    observation(request.scope).failed(error)
    return error_response(error)


async def _answer_fault(_request: Request, _fault: Exception) -> Response:
    """The observer, further out, sees the fault itself and logs it."""
    return error_response(InternalError(FAULT_TEXT))


async def _answer_http_exception(request: Request, exception: Exception) -> Response:
    assert isinstance(exception, HTTPException)
    error = from_http_exception(exception)
    observation(request.scope).failed(error)
    return error_response(error, dict(exception.headers or {}))
