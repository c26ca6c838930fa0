"""From a model folder to a runner on the CPU that holds its weights and its KV cache."""

from __future__ import annotations

from pathlib import Path

import torch

from common.errors import ConfigError
from engine import block_memory
from engine.block_memory import Allocate
from engine.config import EngineConfig
from engine.cpu_runner import TorchRunner
from engine.kv_cache import KvCache, block_bytes
from engine.model_config import ModelConfig
from engine.models.decoder import DecoderModel
from engine.models.decoder_weights import load_decoder
from engine.weights import Progress, WeightFolder

_DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


def load_runner(
    model_dir: Path,
    config: EngineConfig,
    dtype: str = "auto",
    num_threads: int = 1,
    kv_cache_bytes: int | None = None,
    progress: Progress | None = None,
    allocate: Allocate = block_memory.private,
) -> TorchRunner:
    """Load a model folder for `config`. `kv_cache_bytes`, when given, sets the number of blocks instead of
    `config.num_blocks` (the runner's `num_blocks` tells it). `num_threads` holds for all of the process.

    Raises `ModelLoadError` for the folder and `ConfigError` for the other arguments.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)} on the CPU, got {dtype!r}", param="dtype")
    if num_threads < 1:
        raise ConfigError(f"num_threads must be at least 1, got {num_threads}", param="num_threads")
    model_config = ModelConfig.from_folder(model_dir)
    if config.max_model_len > model_config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len ({config.max_model_len}) is beyond the model's context "
            f"({model_config.max_position_embeddings})", param="max_model_len")
    num_blocks = _num_blocks(model_config, config, _DTYPES[dtype], kv_cache_bytes)
    torch.set_num_threads(num_threads)
    with WeightFolder(model_dir, progress) as weights:
        loaded = load_decoder(model_config.decoder, weights, _DTYPES[dtype])
    model = DecoderModel(model_config, loaded, config.max_model_len)
    return TorchRunner(model, KvCache(model_config, num_blocks, config.block_size, _DTYPES[dtype], allocate))


def _num_blocks(model: ModelConfig, config: EngineConfig, dtype: torch.dtype, kv_cache_bytes: int | None) -> int:
    if kv_cache_bytes is None:
        return config.num_blocks
    size = block_bytes(model, config.block_size, dtype)
    if kv_cache_bytes < size:
        raise ConfigError(
            f"kv_cache_bytes must hold at least one block of {size} bytes, got {kv_cache_bytes}",
            param="kv_cache_bytes")
    return kv_cache_bytes // size
