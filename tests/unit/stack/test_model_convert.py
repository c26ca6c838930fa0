from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM

from common.errors import ModelLoadError
from engine.config import EngineConfig
from engine.runner_loading import load_runner
from engine.step import StepPlan
from stack.model_convert import convert_gguf
from tests.factories import planned_row

VOCAB = 300
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 4, 2, 16, 96
PROMPT = [(7 * i * i + 3 * i + 11) % VOCAB for i in range(20)]


def _tiny_gguf(path: Path, architecture: str = "llama") -> Path:
    """One layer of random float32 weights with a byte-level tokenizer of 300 tokens."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "1", "t1", *(f"<{i}>" for i in range(VOCAB - 3))])
    writer.add_token_types([TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (VOCAB, HIDDEN), "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
              "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN), "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
              "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM), "blk.0.ffn_gate": (INTERMEDIATE, HIDDEN),
              "blk.0.ffn_up": (INTERMEDIATE, HIDDEN), "blk.0.ffn_down": (HIDDEN, INTERMEDIATE)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32) / np.float32(8))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _ignore(stage: str, done: int, total: int) -> None:
    pass


@pytest.mark.full
def test_a_gguf_becomes_a_folder_that_computes_what_transformers_reads_in_it(tmp_path: Path) -> None:
    gguf = _tiny_gguf(tmp_path / "tiny.gguf")
    heard: list[tuple[int, int]] = []
    folder = convert_gguf(gguf, tmp_path / "tiny", lambda stage, done, total: heard.append((done, total)))
    assert heard[-1][0] == heard[-1][1] > 0
    assert (folder / "tokenizer.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=gguf.name, dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.tensor([PROMPT])).logits[0, -1:]
    runner = load_runner(folder, EngineConfig(num_blocks=8, max_model_len=64))
    got = runner.logits(StepPlan(1, [planned_row(PROMPT, [5, 2])]))[1]
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


@pytest.mark.full
def test_an_architecture_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    gguf = _tiny_gguf(tmp_path / "tiny.gguf", "rwkv6")
    with pytest.raises(ModelLoadError, match=r"converting tiny\.gguf failed .*rwkv6"):
        convert_gguf(gguf, tmp_path / "tiny", _ignore)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tiny.lock", "tiny.gguf"]


def test_what_is_no_gguf_file_or_no_new_folder_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("GGU")
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "out", _ignore)
    with pytest.raises(ModelLoadError, match=r"none\.gguf: No such file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out", _ignore)
    (tmp_path / "torn.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(ModelLoadError, match=r"torn\.gguf cannot be read"):
        convert_gguf(tmp_path / "torn.gguf", tmp_path / "out", _ignore)
    with pytest.raises(ModelLoadError, match="is there already"):
        convert_gguf(_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path, _ignore)
