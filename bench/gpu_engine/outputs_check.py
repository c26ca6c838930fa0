"""Whether what is measured is right: a copy of the shape with few layers against plain torch.

Against float32 on the CPU, from which every computation in bfloat16 is some way off: ours is no farther than plain
torch's of the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import torch

from bench.figures import Figure
from bench.gpu_engine.plain_torch import PlainTorch
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
_PLAIN_LIMIT = 2e-2
_NEXT_TOKEN = 1000
_PARAMS = SamplingParams(max_tokens=8, temperature=0.0)


def measure(name: str, device: torch.device) -> Iterator[Figure]:
    """Relative errors of the logits after prompts and after a decode step, by graphs and kernel by kernel.

    Raises `RuntimeError` where plain torch itself is far from float32: then it is no measure.
    """
    model = shape(name, _NUM_LAYERS)
    weights = random_weights(model.decoder, torch.bfloat16, device)
    std = float(weights.layers[0].gate_up.float().std())
    if not 0.015 < std < 0.025:
        raise RuntimeError(f"the weights are not random: their deviation is {std:g}")
    wide = _on_cpu(weights)
    reference = TorchRunner(
        DecoderModel(model, wide, _MAX_LEN), KvCache(model, _NUM_BLOCKS, _BLOCK_SIZE, torch.float32))
    exact = [_in_order(*reference.logits(plan)) for plan in _plans()]
    plain = PlainTorch(model.decoder, weights, _MAX_LEN)
    same = [plain.last_logits(prompts).cpu() for prompts in _known()]
    apart = [_error(*pair) for pair in zip(same, exact, strict=True)]
    if max(apart) > _PLAIN_LIMIT:
        raise RuntimeError(f"plain torch is {max(apart):g} from float32")
    for graphs in (True, False):
        pool = torch.zeros(
            _NUM_BLOCKS, _NUM_LAYERS, 2, model.num_kv_heads, _BLOCK_SIZE, model.head_dim, dtype=torch.bfloat16,
            device=device)
        state = DeviceState.make(GpuDecoder(model.decoder, weights, pool, _MAX_LEN), 32, _MAX_LEN)
        runner = GpuRunner(state, model.eos_token_ids, 8, 2048)
        if graphs:
            runner.capture(lambda *_, **__: None)
        way = "graph" if graphs else "kernels"
        for plan, right, rough, far, kind in zip(_plans(), exact, same, apart, ("prompts", "decode"), strict=True):
            logits = runner.logits(plan).cpu()
            yield Figure(f"logits from plain torch, {kind}, {way}", _error(logits, rough), "relative")
            error = _error(logits, right)
            yield Figure(f"logits from float32, {kind}, {way}", error, "relative", "plain torch", far, far / error, 1.0)
        runner.whole_prompt_tokens = _PROMPTS[0]
        plan = _plans()[0]
        alone = replace(plan, chunks=plan.chunks[:1], joins=plan.joins[:1])
        error = _error(runner.logits(alone).cpu(), exact[0][:1])
        yield Figure(f"logits from float32, one prompt by torch's attention, {way}", error, "relative", "plain torch",
                     apart[0], apart[0] / error, 0.8)


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


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
        [row.request_id for row in chunks], [_NEXT_TOKEN + i for i in range(num)], list(_PROMPTS), tables, [1] * num,
        [_PARAMS] * num)
    return [StepPlan(1, chunks, joins=joins), StepPlan(2, [], decode)]


def _known() -> list[list[list[int]]]:
    """All tokens of each sequence at each of the plans."""
    prompts = [list(row.token_ids) for row in _plans()[0].chunks]
    return [prompts, [[*prompt, _NEXT_TOKEN + i] for i, prompt in enumerate(prompts)]]


def _on_cpu(weights: DecoderWeights) -> DecoderWeights:
    def moved(value: torch.Tensor) -> torch.Tensor:
        return value.float().cpu().contiguous()

    layers = tuple(replace(layer, **{f.name: moved(value) for f in fields(LayerWeights)
                                     if (value := getattr(layer, f.name)) is not None}) for layer in weights.layers)
    return DecoderWeights(moved(weights.embedding), layers, moved(weights.norm), moved(weights.head))
