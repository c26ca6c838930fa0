"""How many KV blocks a GPU has room for: what is really free once all else is there. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one device. `free` is of before anything was loaded; the others are what this engine takes."""

    total: int
    free: int
    weights: int
    activations: int  # at the peak of the largest step, and the state of the rows
    graphs: int

    @property
    def taken(self) -> int:
        return self.weights + self.activations + self.graphs


def kv_blocks(
    memory: GpuMemory, utilization: float, block_bytes: int, blocks_of_longest: int, max_model_len: int
) -> int:
    """As many as fit into `utilization` of the device, beside what the engine takes and what others hold.

    Raises `ConfigError` with all the numbers where one sequence of `max_model_len` tokens does not fit.
    """
    left = min(int(memory.total * utilization), memory.free) - memory.taken
    num_blocks = max(0, left) // block_bytes
    if num_blocks < blocks_of_longest:
        raise ConfigError(
            f"gpu_memory_utilization={utilization:g}: too little memory for the KV cache. The GPU has "
            f"{_gib(memory.total)}, {_gib(memory.free)} of it free; needed are {_gib(memory.weights)} for weights, "
            f"{_gib(memory.activations)} for activations, {_gib(memory.graphs)} for CUDA graphs and "
            f"{_gib(blocks_of_longest * block_bytes)} for one sequence of max_model_len={max_model_len}; "
            f"left for the KV cache are {_gib(max(0, left))}", param="gpu_memory_utilization")
    return num_blocks


def check_weights(free: int, weights: int) -> None:
    """Before they are loaded. Raises `ConfigError`."""
    if weights > free:
        raise ConfigError(
            f"model_path: the weights take {_gib(weights)}, but {_gib(free)} of the GPU's memory are free",
            param="model_path")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
