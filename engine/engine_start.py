"""Starts a worker's engine where its configuration wants it."""

from __future__ import annotations

import asyncio

from engine.async_engine import AsyncEngine
from engine.engine_port import EngineListener, EnginePort
from engine.model_engine import ModelEngine
from engine.process.client import EngineProcess
from engine.worker_config import WorkerConfig


async def start_engine(config: WorkerConfig, model: str, hash_key: bytes, listener: EngineListener) -> EnginePort:
    """Return when it can step. Raises `ModelLoadError`, `ConfigError` or `InternalError` with one clear line."""
    if config.engine_process:
        process = EngineProcess(config, model, hash_key, listener)
        await process.start()
        return process
    loaded = await asyncio.to_thread(ModelEngine.load, config, model, hash_key)
    engine = AsyncEngine(loaded.core, listener, loaded.facts, loaded.grammar_compiler)
    engine.start()
    return engine
