"""Turn one GGUF file into a Hugging Face folder of float32 safetensors: `python -P gguf_convert.py FILE OUT`.

Runs in a process of its own, so that the caller never loads torch or transformers and gets their memory back.
Nothing is fetched and no code of the model is run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def convert(gguf: Path, out: Path) -> None:
    """Dequantise `gguf` and write `config.json`, `model.safetensors` and the tokenizer files into `out`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # The weights are plain float32 now; left marked as quantised, save_pretrained refuses to write them.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.quantization_method = None
    model.save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))
    for path in out.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
