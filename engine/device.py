"""Where a worker's engine runs, and what that means for the sizes that nobody has set.

Torch is loaded only where a GPU is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """`name` as torch takes it: cpu, or cuda:0 and up. The rest are defaults."""

    name: str
    dtype: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"


CPU = Device("cpu", "float32", block_size=16, max_num_seqs=64, max_num_batched_tokens=512)


def find_device(asked: str) -> Device:
    """`asked`: cpu, cuda (the first), cuda:N, or auto: the first GPU if there is one.

    Raises `ConfigError` where there is no such GPU, or Triton is missing.
    """
    if asked == "cpu":
        return CPU
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto" and not num_gpus:
        return CPU
    index = int(asked.partition(":")[2] or 0)
    if index >= num_gpus:
        raise ConfigError(
            f"device={asked}: torch {torch.__version__} sees {num_gpus or 'no'} GPU{'s' if num_gpus > 1 else ''}",
            param="device")
    if find_spec("triton") is None:
        raise ConfigError(f"device={asked}: Triton is not installed, see the extra 'gpu'", param="device")
    return Device(f"cuda:{index}", "bfloat16", block_size=64, max_num_seqs=256, max_num_batched_tokens=8192)
