"""Executes step plans with torch on the CPU.

Life: loaded (weights and KV cache allocated) → executing, one plan at a time → dropped with the process. Between
plans it holds nothing of a request but the KV bytes in the request's blocks.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.cpu_attention import CpuAttention
from engine.kv_cache import KvCache, block_bytes
from engine.llama import Llama
from engine.model_config import ModelConfig
from engine.ragged_batch import build_batch
from engine.sampler import draw
from engine.step import StepPlan, StepResult
from engine.weights import Progress, WeightFolder

_DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchRunner:
    """A `Runner`. A token id outside the vocabulary or a block outside the pool raises `IndexError`."""

    def __init__(self, model: Llama, cache: KvCache) -> None:
        self.model_config = model.config
        self.cache = cache
        self._model = model
        self._launched: deque[StepPlan] = deque()

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.model_config.eos_token_ids

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def block_bytes(self) -> int:
        return self.cache.block_bytes

    def block_view(self, block_id: int) -> memoryview:
        return self.cache.block_view(block_id)

    def launch(self, plan: StepPlan) -> None:
        """The work is done in `collect`: there is no other processor to give it to."""
        self._launched.append(plan)

    def collect(self) -> StepResult:
        return self._execute(self._launched.popleft())

    def _execute(self, plan: StepPlan) -> StepResult:
        """Compute every row's KV and draw a token for each row that samples."""
        drawn: list[int | None] = [None] * plan.num_rows
        indices, logits = self.logits(plan)
        for index, row_logits in zip(indices, logits.numpy(), strict=True):
            row = plan.rows[index]
            drawn[index] = draw(row_logits, row.params, row.output_position)
        return StepResult(plan.step_id, drawn)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> tuple[list[int], torch.Tensor]:
        """Compute the plan's KV; the indices of the rows that sample and their logits [rows, vocab] float32."""
        if not plan.num_rows:
            return [], torch.empty(0, self.vocab_size)
        batch = build_batch(plan, self.cache.block_size)
        attention = CpuAttention(self.cache, batch.rows, torch.from_numpy(batch.slot_mapping))
        hidden = self._model.forward(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), attention)
        last = torch.tensor([flat for _, flat in batch.sampled], dtype=torch.int64)
        return [index for index, _ in batch.sampled], self._model.logits(hidden[last])

    def forget(self, request_id: str) -> None:
        """Nothing is kept for a request here."""


def load_runner(
    model_dir: Path,
    config: EngineConfig,
    dtype: str = "auto",
    device: str = "cpu",
    num_threads: int = 1,
    kv_cache_bytes: int | None = None,
    progress: Progress | None = None,
) -> TorchRunner:
    """Load a model folder for `config`. `kv_cache_bytes`, when given, sets the number of blocks instead of
    `config.num_blocks` (the runner's `num_blocks` tells it). `num_threads` holds for all of the process.

    Raises `ModelLoadError` for the folder and `ConfigError` for the other arguments.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)} on the CPU, got {dtype!r}", param="dtype")
    if device != "cpu":
        raise ConfigError(f"device must be 'cpu' for this runner, got {device!r}", param="device")
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
        model = Llama(model_config, weights, _DTYPES[dtype], config.max_model_len)
    return TorchRunner(model, KvCache(model_config, num_blocks, config.block_size, _DTYPES[dtype]))


def _num_blocks(model: ModelConfig, config: EngineConfig, dtype: torch.dtype, kv_cache_bytes: int | None) -> int:
    if kv_cache_bytes is None:
        return config.num_blocks
    size = block_bytes(model, config.block_size, dtype)
    if kv_cache_bytes < size:
        raise ConfigError(
            f"kv_cache_bytes must hold at least one block of {size} bytes, got {kv_cache_bytes}",
            param="kv_cache_bytes")
    return kv_cache_bytes // size
