"""The HTTP application: every route, and the layers around them (observer, then key guard, then routes)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import REGISTRY
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from common.directory import Directory
from common.errors import InternalError, ShoalError
from common.exposition import encoder
from common.generation import DecodePort, ModelFacts
from common.placement import RouterPort
from common.tokenized import TokenizerPort
from gateway.admission import Admission
from gateway.attempts import AttemptLimits
from gateway.auth import KeyGuard
from gateway.config import GatewayConfig
from gateway.errors import FAULT_TEXT, error_response, from_http_exception
from gateway.generation_answer import GenerationAnswer, GenerationDesk
from gateway.goodput import SloLimits
from gateway.observation import Observer, observation
from gateway.openapi import body_of, describe_errors
from gateway.pipeline import Pipeline, PipelineLimits
from gateway.readiness import readiness
from gateway.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from gateway.text_desk import TextDesk


@dataclass(frozen=True, slots=True)
class Ports:
    """What the application is joined to."""

    tokenizer: TokenizerPort
    decode: DecodePort
    router: RouterPort | None  # None: requests are placed by load
    directory: Directory


def build_app(
    config: GatewayConfig, keys: tuple[str, ...], ports: Ports, admission: Admission, version: str
) -> ASGIApp:
    """The whole application, ready to be served."""
    slo = SloLimits(config.slo_ttft_ms / 1000, config.slo_tpot_ms / 1000)
    slo.publish()
    return Observer(KeyGuard(build_routes(config, ports, admission, version), keys), slo)


def build_routes(config: GatewayConfig, ports: Ports, admission: Admission, version: str) -> FastAPI:
    app = FastAPI(title="shoal", version=version, redirect_slashes=False, docs_url=None, redoc_url=None,
                  telemetry={"tracing": False, "metrics": False, "logs": False})  # our own are all there is
    app.add_exception_handler(ShoalError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_fault)
    pipeline = Pipeline(ports.tokenizer, ports.decode, ports.router, PipelineLimits(
        AttemptLimits(config.worker_wait_s, config.max_placements), config.default_max_tokens))
    _add_generation(app, GenerationDesk(pipeline, admission, config))
    _add_text(app, TextDesk(ports.tokenizer, pipeline, admission, config))
    _add_models(app, pipeline, ports.decode)
    _add_probes(app, ports, admission, version)
    describe_errors(app)
    return app


def _add_generation(app: FastAPI, desk: GenerationDesk) -> None:
    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
    async def chat_completions() -> Response:
        """One reply to a conversation; with `stream: true` as server-sent events."""
        return GenerationAnswer(desk, "chat")

    @app.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
    async def completions() -> Response:
        """The continuation of one prompt; with `stream: true` as server-sent events."""
        return GenerationAnswer(desk, "completion")


def _add_text(app: FastAPI, desk: TextDesk) -> None:
    @app.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return _json(await desk.tokenize(request))

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return _json(await desk.detokenize(request))


def _add_models(app: FastAPI, pipeline: Pipeline, decode: DecodePort) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """All models that a worker serves, or has served since this gateway started."""
        return _json({"object": "list", "data": [_model_body(m) for m in decode.models()]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str, request: Request) -> Response:
        """One model; its id may hold slashes."""
        facts = pipeline.find_model(model_id)
        observation(request.scope).model = facts.name
        return _json(_model_body(facts))


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
        encode, content_type = encoder(request.headers.get("accept", ""))
        return Response(await asyncio.to_thread(encode, REGISTRY), headers={"content-type": content_type})

    async def version_of_server() -> Response:
        """The version of this server."""
        return _json({"version": version})

    handlers: dict[str, Callable[..., Any]] = {
        "/health": alive, "/live": alive, "/ping": alive, "/ready": ready, "/metrics": metrics,
        "/version": version_of_server}
    for path, handler in handlers.items():
        app.add_api_route(path, handler, methods=["GET"])
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
