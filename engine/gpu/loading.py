"""From a model, in a folder or of random weights, to a `GpuRunner` that is ready: nothing is compiled after.

Order: weights → a probe of the largest step and of the largest graphs, on a pool of a few blocks → the KV pool, from
the memory that is left → all graphs and kernels.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from common.errors import ConfigError
from engine.gpu.compile_watch import CompileWatch
from engine.gpu.decoder import GpuDecoder, check_supported
from engine.gpu.device_state import DeviceState
from engine.gpu.gpu_runner import GpuRunner
from engine.gpu.random_weights import random_weights
from engine.gpu.sizing import GpuMemory, check_weights, kv_blocks
from engine.gpu.step_graphs import Say
from engine.gpu.warm_up import StepSizes, largest_step, run, warm_up
from engine.model_config import ModelConfig
from engine.models.decoder_weights import DecoderWeights, load_decoder
from engine.models.parts import Decoder
from engine.weights import Progress, WeightFolder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PROBE_GRAPHS = 3  # after the largest
_LEAST_GRAPH_BYTES = 4 << 20  # of the driver, for one more graph
_MAX_PROBE_TOKENS = 4096  # of one sequence, while there is no pool yet


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """`num_blocks` 0: as many as `gpu_memory_utilization` of the device holds."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int = 0
    gpu_memory_utilization: float = 0.9

    def steps(self, num_blocks: int) -> StepSizes:
        return StepSizes(self.max_num_seqs, self.max_num_batched_tokens,
                         min(self.max_model_len, num_blocks * self.block_size), self.block_size)


def load_gpu_runner(
    model: ModelConfig, folder: Path | None, sizes: GpuSizes, device: str, dtype: str, *, say: Say, warn: Say,
    progress: Progress | None = None,
) -> GpuRunner:
    """`folder` None: random weights. `say` and `warn` take (event, **fields), as a logger's methods.

    Raises `ModelLoadError` for the model, and `ConfigError` where the memory is too small.
    """
    if sizes.block_size < 16 or sizes.block_size & (sizes.block_size - 1):
        raise ConfigError(
            f"block_size must be a power of two of at least 16 on a GPU, got {sizes.block_size}", param="block_size")
    check_supported(model.decoder)
    place, kind = torch.device(device), DTYPES[dtype]
    torch.cuda.set_device(place)
    watch = CompileWatch(warn)
    started = time.monotonic()
    total, free = _free(place)[::-1]
    check_weights(free, num_parameters(model.decoder) * kind.itemsize)
    weights = _weights(model.decoder, folder, kind, place, progress)
    say("weights_on_device", seconds=round(time.monotonic() - started, 2), device=device)
    maker = _Maker(model, weights, sizes)
    num_blocks = sizes.num_blocks or maker.num_blocks(total, free, say)
    try:
        runner = maker.runner(num_blocks)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"num_blocks={num_blocks}: the KV cache of {num_blocks * maker.block_bytes >> 20} MiB does not fit into "
            f"the {_free(place)[0] >> 20} MiB that are free", param="num_blocks") from error
    runner.capture(say)
    say("graphs_captured", num_graphs=runner.graphs.num_wanted, seconds=round(time.monotonic() - started, 2))
    steps = sizes.steps(num_blocks)
    warm_up(runner, steps)
    if kind is torch.bfloat16 and steps.max_num_batched_tokens <= steps.max_len:
        runner.choose_attention(steps.max_num_batched_tokens, say)
    watch.be_ready()
    say("gpu_ready", seconds=round(time.monotonic() - started, 2), num_blocks=num_blocks,
        num_kernels=watch.num_compiled, free_mib=_free(place)[0] >> 20)
    return runner


def num_parameters(decoder: Decoder) -> int:
    """Without norms and biases."""
    sizes = decoder.sizes
    heads = 2 * sizes.num_heads + 2 * sizes.num_kv_heads
    layer = sizes.hidden * (heads * sizes.head_dim + 3 * sizes.intermediate)
    return sizes.num_layers * layer + sizes.vocab * sizes.hidden * (1 if decoder.is_tied else 2)


def _weights(
    decoder: Decoder, folder: Path | None, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> DecoderWeights:
    if folder is None:
        return random_weights(decoder, dtype, device)
    with WeightFolder(folder, progress) as stored:
        return load_decoder(decoder, stored, dtype, device)


class _Maker:
    """Makes runners over pools of any size, with the same weights."""

    def __init__(self, model: ModelConfig, weights: DecoderWeights, sizes: GpuSizes) -> None:
        self._model, self._weights, self._sizes = model, weights, sizes
        self._device, self._dtype = weights.norm.device, weights.norm.dtype
        self.block_bytes = (
            model.num_layers * 2 * model.num_kv_heads * sizes.block_size * model.head_dim * self._dtype.itemsize)

    def runner(self, num_blocks: int) -> GpuRunner:
        model, sizes = self._model, self._sizes
        pool = torch.zeros(num_blocks, model.num_layers, 2, model.num_kv_heads, sizes.block_size, model.head_dim,
                           dtype=self._dtype, device=self._device)
        decoder = GpuDecoder(model.decoder, self._weights, pool, sizes.max_model_len)
        # Ended sequences keep their row for one more step, and those that never join have one for a launch.
        state = DeviceState.make(decoder, 3 * sizes.max_num_seqs, sizes.max_model_len)
        return GpuRunner(state, model.eos_token_ids, sizes.max_num_seqs, sizes.max_num_batched_tokens)

    def num_blocks(self, total: int, free: int, say: Say) -> int:
        """`free`: before the weights."""
        memory = self._measured(total, free, say)
        gc.collect()
        torch.cuda.empty_cache()
        say("gpu_memory", **{f"{field.name}_mib": getattr(memory, field.name) >> 20 for field in fields(memory)})
        return kv_blocks(memory, self._sizes.gpu_memory_utilization, self.block_bytes, self._num_longest,
                         self._sizes.max_model_len)

    def _measured(self, total: int, free: int, say: Say) -> GpuMemory:
        """What rows, the largest step and the largest graphs take, by a runner with a small pool."""
        sizes, device = self._sizes, self._device
        num_blocks = min(self._num_longest, -(-_MAX_PROBE_TOKENS // sizes.block_size))
        before = _free(device)[0]
        probe = self.runner(num_blocks)
        run(probe, largest_step(sizes.steps(num_blocks)))
        activations = max(0, before - _free(device)[0] - num_blocks * self.block_bytes)
        largest = _drop(device, lambda: probe.capture(say, 1))
        other = max(_LEAST_GRAPH_BYTES, _drop(device, lambda: probe.capture(say, _PROBE_GRAPHS)) // _PROBE_GRAPHS)
        return GpuMemory(total, free, weights=free - before, activations=activations,
                         graphs=largest + other * (probe.graphs.num_wanted - 1))

    @property
    def _num_longest(self) -> int:
        return -(-self._sizes.max_model_len // self._sizes.block_size)


def _free(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes."""
    return torch.cuda.mem_get_info(device)


def _drop(device: torch.device, act: Callable[[], object]) -> int:
    """By how many bytes the device's free memory is less after `act`."""
    torch.cuda.synchronize(device)
    before = _free(device)[0]
    act()
    torch.cuda.synchronize(device)
    return max(0, before - _free(device)[0])
