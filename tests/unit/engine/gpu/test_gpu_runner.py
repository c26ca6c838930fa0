"""The GPU runner's tokens are the CPU runner's, through the whole engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from common.block_hash import HashScheme
from common.errors import InternalError
from common.sampling_params import SamplingParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.cpu_runner import TorchRunner
from engine.gpu.decoder import GpuDecoder
from engine.gpu.device_rows import DeviceRows
from engine.gpu.device_state import DeviceState
from engine.gpu.gpu_runner import GpuRunner
from engine.gpu.random_weights import random_weights
from engine.kv_cache import KvCache
from engine.model_config import ModelConfig
from engine.models import ARCHITECTURES
from engine.models.config_fields import ConfigFields
from engine.models.decoder import DecoderModel
from engine.models.decoder_weights import DecoderWeights, LayerWeights
from engine.request import EngineRequest
from engine.step import Runner
from tests.kernel_mode import DEVICE

BLOCKS, BLOCK_SIZE, MAX_LEN, SEQS, BUDGET = 12, 16, 64, 3, 48
CONFIG = EngineConfig(block_size=BLOCK_SIZE, num_blocks=BLOCKS, max_model_len=MAX_LEN, max_num_seqs=SEQS,
                      max_num_batched_tokens=BUDGET)
MODEL = ModelConfig("Qwen3ForCausalLM", ARCHITECTURES["Qwen3ForCausalLM"](ConfigFields({
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 96, "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False})), frozenset({0}))
ASKED = (
    ([7, 8, 9], {"max_tokens": 4, "temperature": 0.0}),
    (list(range(20, 50)), {"max_tokens": 3, "temperature": 0.8, "seed": 3}),
    (list(range(20, 45)), {"max_tokens": 2, "prompt_logprobs": 1, "logprobs": 2}),
    ([30, 31], {"max_tokens": 2, "n": 2, "seed": 5}),
    ([5], {"max_tokens": 3, "top_p": 0.7, "repetition_penalty": 1.3}))


def weights() -> DecoderWeights:
    """Of logits that lie so far apart that rounding changes no draw."""
    made = random_weights(MODEL.decoder, torch.float32, DEVICE)
    return DecoderWeights(made.embedding * 20, made.layers, made.norm, (made.head.t() * 20).t())


def runners() -> Iterator[Runner]:
    held = weights()

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.cpu().contiguous()

    layers = tuple(replace(layer, **{f.name: moved(getattr(layer, f.name)) for f in fields(LayerWeights)})
                   for layer in held.layers)
    on_cpu: Any = DecoderWeights(*(moved(held.embedding), layers, moved(held.norm), moved(held.head)))  # type: ignore[arg-type]
    yield TorchRunner(DecoderModel(MODEL, on_cpu, MAX_LEN), KvCache(MODEL, BLOCKS, BLOCK_SIZE, torch.float32))
    pool = torch.zeros(BLOCKS, 1, 2, 1, BLOCK_SIZE, 16, device=DEVICE)
    state = DeviceState.make(GpuDecoder(MODEL.decoder, held, pool, MAX_LEN), 3 * SEQS, MAX_LEN)
    yield GpuRunner(state, MODEL.eos_token_ids, SEQS, BUDGET)


def answers(core: EngineCore) -> tuple[dict[tuple[str, int], list[int]], dict[str, list[float]]]:
    found: dict[tuple[str, int], list[int]] = {}
    scores: dict[str, list[float]] = {}
    for i, (prompt, params) in enumerate(ASKED):
        core.add(EngineRequest(str(i), prompt, SamplingParams(ignore_eos=True, **params)))  # type: ignore[arg-type]
    while core.has_work:
        for output in core.step():
            assert output.error is None
            found.setdefault((output.request_id, output.choice), []).extend(output.new_token_ids)
            scores.setdefault(output.request_id, []).extend(
                score.logprob for score in (*output.prompt_logprobs, *output.logprobs) if score is not None)
    core.check_integrity()
    return found, scores


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("captured", [False, True])
def test_requests_of_all_kinds_get_the_cpu_engines_tokens(captured: bool) -> None:
    cpu, gpu = runners()
    assert isinstance(gpu, GpuRunner)
    if captured:
        gpu.capture(lambda *_, **__: None)
    found = [answers(EngineCore(CONFIG, runner, HashScheme(b"k" * 32, "m", "r", "float32", BLOCK_SIZE)))
             for runner in (cpu, gpu)]
    assert found[1][0] == found[0][0]
    assert found[1][1]["2"] == pytest.approx(found[0][1]["2"], abs=1e-4)
    assert gpu._state.rows.num_free == 3 * SEQS
    assert (gpu.num_graph_steps > 0) is captured


@pytest.mark.usefixtures("runtime")
def test_rows_of_the_device_are_taken_once_and_a_table_that_is_too_long_is_refused() -> None:
    rows = DeviceRows(2, 3, DEVICE)
    taken = [rows.take(1, 0.5), rows.take(2, 0.5)]
    assert sorted(taken) == [0, 1]
    with pytest.raises(InternalError, match="all 2 rows of the device are taken"):
        rows.take(3, 0.5)
    rows.free(taken[0])
    assert rows.take(3, 0.5) == taken[0]
    with pytest.raises(InternalError, match="4 blocks, the device's rows hold 3"):
        rows.set_table(0, (1, 2, 3, 4))


@pytest.mark.usefixtures("runtime")
def test_a_fault_of_the_device_ends_the_engine_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _, gpu = runners()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(gpu, "_launch", lambda plan: (_ for _ in ()).throw(
        RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")))
    core = EngineCore(CONFIG, gpu, HashScheme(b"k" * 32, "m", "r", "float32", BLOCK_SIZE))
    core.add(EngineRequest("a", [1], SamplingParams(max_tokens=1)))
    with pytest.raises(RuntimeError, match=r"H200\) failed: CUDA error: an illegal memory access was encountered$"):
        core.step()
