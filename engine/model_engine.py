"""From a model folder and a configuration to an engine that is ready to step."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from common import logs
from common.block_hash import HashScheme
from common.errors import ConfigError
from common.service_record import Fingerprint
from engine import block_memory
from engine.block_memory import Allocate
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import CPU, Device, find_device
from engine.engine_port import EngineFacts
from engine.garbage import spare_collector
from engine.grammar.compiler import GrammarCompiler
from engine.load_bar import load_bar
from engine.mock_runner import MockMode, MockRunner
from engine.model_config import ModelConfig
from engine.model_revision import model_revision
from engine.step import Runner
from engine.worker_config import WorkerConfig

log = logs.get(__name__)
Progress = Callable[[int, int], None]  # (bytes read, bytes in all)

MAX_KV_EVENTS = 65_536  # that a worker may leave undrained
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelEngine:
    """`grammar_compiler` is None for a model without a tokenizer."""

    core: EngineCore
    facts: EngineFacts
    grammar_compiler: GrammarCompiler | None = None

    @staticmethod
    def load(
        config: WorkerConfig, model: str, hash_key: bytes, *, allocate: Allocate = block_memory.private,
        progress: Progress | None = None,
    ) -> ModelEngine:
        """Blocking: seconds for a small model, a minute on a GPU.

        `allocate` gives the KV cache its memory on the CPU, `progress` is told of (bytes read, bytes in all); without
        it a terminal sees a bar. Raises `ModelLoadError` or `ConfigError` with one clear line.
        """
        started = time.monotonic()
        folder = Path(config.model_path)
        shape = ModelConfig.from_folder(folder)
        device = CPU if config.runner.startswith("mock-") else find_device(config.device)
        fingerprint = Fingerprint(
            model=model, revision=model_revision(folder),
            dtype=device.dtype if config.dtype == "auto" else config.dtype,
            block_size=config.block_size or device.block_size, num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
        engine_config = _engine_config(config, shape, fingerprint, device)
        with load_bar(model) if progress is None else nullcontext(progress) as told:
            if device.is_gpu:
                runner, engine_config = _gpu_runner(config, engine_config, folder, shape, fingerprint, device, told)
            else:
                runner = _runner(config, engine_config, folder, shape, allocate, told)
        scheme = HashScheme(hash_key, model, fingerprint.revision, fingerprint.dtype, fingerprint.block_size)
        spare_collector()
        log.info("model_loaded", model=model, revision=fingerprint.revision, runner=config.runner, device=device.name,
                 dtype=fingerprint.dtype, seconds=round(time.monotonic() - started, 2),
                 num_blocks=engine_config.num_blocks)
        core = EngineCore(engine_config, runner, scheme, max_kv_events=MAX_KV_EVENTS)
        capacity = {name: getattr(engine_config, name) for name in ("num_blocks", "max_num_seqs", "max_model_len")}
        facts = EngineFacts(fingerprint, capacity, core.block_bytes, has_host_blocks=not device.is_gpu)
        return ModelEngine(core, facts, _grammar_compiler(folder, runner))


def _grammar_compiler(folder: Path, runner: Runner) -> GrammarCompiler | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    return GrammarCompiler(folder, runner.vocab_size, runner.eos_token_ids)


def _engine_config(
    config: WorkerConfig, shape: ModelConfig, fingerprint: Fingerprint, device: Device
) -> EngineConfig:
    """On a GPU, without `num_blocks`, of one block: how many there are is known once all else is loaded."""
    max_model_len = config.max_model_len or shape.max_position_embeddings
    if max_model_len > shape.max_position_embeddings:
        raise ConfigError(f"max_model_len={max_model_len} is beyond the model's context of "
                          f"{shape.max_position_embeddings}", param="max_model_len")
    block_bytes = (shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * fingerprint.block_size
                   * _ITEM_BYTES[fingerprint.dtype])
    num_blocks = config.num_blocks or (1 if device.is_gpu else config.kv_cache_bytes // block_bytes)
    if num_blocks < 1:
        raise ConfigError(f"kv_cache_bytes={config.kv_cache_bytes} is less than one block of {block_bytes} bytes",
                          param="kv_cache_bytes")
    return EngineConfig(
        block_size=fingerprint.block_size, num_blocks=num_blocks, max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs or device.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or device.max_num_batched_tokens,
        max_num_waiting=config.max_num_waiting, enable_prefix_caching=config.enable_prefix_caching,
        enable_overlap=config.enable_overlap, headroom_fraction=config.headroom_fraction,
        min_prefill_fraction=config.min_prefill_fraction)


def _runner(
    config: WorkerConfig, engine: EngineConfig, folder: Path, shape: ModelConfig, allocate: Allocate,
    progress: Progress | None,
) -> Runner:
    if config.runner.startswith("mock-"):
        return MockRunner(
            MockMode(config.runner.removeprefix("mock-")), num_blocks=engine.num_blocks, block_size=engine.block_size,
            vocab_size=shape.vocab_size, eos_token_ids=shape.eos_token_ids, step_seconds=config.mock_step_s,
            allocate=allocate)
    from engine.runner_loading import load_runner  # only here is torch loaded

    return load_runner(folder, engine, config.dtype, config.torch_threads, progress=progress, allocate=allocate)


def _gpu_runner(
    config: WorkerConfig, engine: EngineConfig, folder: Path, shape: ModelConfig, fingerprint: Fingerprint,
    device: Device, progress: Progress | None,
) -> tuple[Runner, EngineConfig]:
    from engine.gpu.loading import GpuSizes, load_gpu_runner  # only here is Triton loaded

    sizes = GpuSizes(
        engine.block_size, engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens,
        config.num_blocks, config.gpu_memory_utilization)
    runner = load_gpu_runner(
        shape, folder, sizes, device.name, fingerprint.dtype, say=log.info, warn=log.warning, progress=progress)
    return runner, replace(engine, num_blocks=runner.num_blocks)
