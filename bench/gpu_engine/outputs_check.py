"""Whether what is measured is right: a copy of the shape with few layers against torch in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import torch

from bench.figures import Figure
from bench.gpu_engine.shapes import shape
from common.sampling_params import SamplingParams
from engine.cpu_runner import TorchRunner
from engine.gpu.decoder import GpuDecoder
from engine.gpu.device_state import DeviceState
from engine.gpu.gpu_runner import GpuRunner
from engine.gpu.random_weights import random_weights
from engine.kv_cache import KvCache
from engine.models.decoder import DecoderModel
from engine.models.decoder_weights import DecoderWeights, LayerWeights
from engine.step import DecodeRows, Join, PlannedRow, StepPlan

_NUM_LAYERS = 2
_BLOCK_SIZE, _NUM_BLOCKS, _MAX_LEN = 64, 48, 1024
_PROMPTS = (700, 129, 64, 1)
_LIMIT = 1e-2
_PARAMS = SamplingParams(max_tokens=8, temperature=0.0)


def measure(name: str, device: torch.device) -> Iterator[Figure]:
    """Relative errors of the logits after prompts and after a decode step, by graphs and kernel by kernel."""
    model = shape(name, _NUM_LAYERS)
    weights = random_weights(model.decoder, torch.bfloat16, device)
    std = float(weights.layers[0].gate_up.float().std())
    if not 0.015 < std < 0.025:
        raise RuntimeError(f"the weights are not random: their deviation is {std:g}")
    wide = _on_cpu(weights)
    reference = TorchRunner(
        DecoderModel(model, wide, _MAX_LEN), KvCache(model, _NUM_BLOCKS, _BLOCK_SIZE, torch.float32))
    wanted = [_in_order(*reference.logits(plan)) for plan in _plans()]
    for graphs in (True, False):
        pool = torch.zeros(
            _NUM_BLOCKS, _NUM_LAYERS, 2, model.num_kv_heads, _BLOCK_SIZE, model.head_dim, dtype=torch.bfloat16,
            device=device)
        state = DeviceState.make(GpuDecoder(model.decoder, weights, pool, _MAX_LEN), 32, _MAX_LEN)
        runner = GpuRunner(state, model.eos_token_ids, 8, 2048)
        if graphs:
            runner.capture(lambda *_, **__: None)
        for plan, right, kind in zip(_plans(), wanted, ("prompts", "decode"), strict=True):
            error = float((runner.logits(plan).cpu() - right).norm() / right.norm())
            way = "graph" if graphs else "kernels"
            yield Figure(f"error of logits, {kind}, {way}", error, "relative", "limit", _LIMIT, _LIMIT / error, 1.0)


def _in_order(indices: list[int], logits: torch.Tensor) -> torch.Tensor:
    """By the plan's rows."""
    return logits[sorted(range(len(indices)), key=indices.__getitem__)]


def _plans() -> list[StepPlan]:
    """Prompts, then a decode step of all."""
    size, chunks, joins, tables = _BLOCK_SIZE, [], [], []
    generator = torch.Generator().manual_seed(1)
    first = 0
    for i, length in enumerate(_PROMPTS):
        num_blocks = length // size + 1
        tables.append(tuple(range(first, first + num_blocks))[::-1])
        first += num_blocks
        ids = torch.randint(256, 100_000, (length,), generator=generator).tolist()
        chunks.append(PlannedRow(f"c{i}", ids, 0, tables[-1], True, 0, _PARAMS))
        joins.append(Join(f"c{i}", ids, length, _PARAMS, 0))
    num = len(_PROMPTS)
    decode = DecodeRows(
        [row.request_id for row in chunks], [1000 + i for i in range(num)], list(_PROMPTS), tables, [1] * num,
        [_PARAMS] * num)
    return [StepPlan(1, chunks, joins=joins), StepPlan(2, [], decode)]


def _on_cpu(weights: DecoderWeights) -> DecoderWeights:
    def moved(value: torch.Tensor) -> torch.Tensor:
        return value.float().cpu().contiguous()

    layers = tuple(replace(layer, **{f.name: moved(value) for f in fields(LayerWeights)
                                     if (value := getattr(layer, f.name)) is not None}) for layer in weights.layers)
    return DecoderWeights(moved(weights.embedding), layers, moved(weights.norm), moved(weights.head))
