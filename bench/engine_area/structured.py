"""A JSON schema with long fixed keys: forced runs make its text faster than free text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from bench.figures import Figure
from common.sampling_params import SamplingParams
from engine.model_engine import ModelEngine
from engine.offline.asked_sampling import StructuredOutputsParams
from engine.request import EngineRequest
from engine.worker_config import WorkerConfig

_KEYS = ("customer_identification_number", "preferred_delivery_address_line", "total_amount_including_taxes",
         "date_of_the_first_order_placed")


def measure(model_path: Path, *, quick: bool, num_threads: int) -> list[Figure]:
    """Characters per second of one request, constrained, beside the same prompt unconstrained."""
    from common.text.model_tokenizer import ModelTokenizer

    fields: dict[str, Any] = {"model_path": str(model_path), "torch_threads": num_threads, "num_blocks": 256}
    config = WorkerConfig(**fields)
    engine = ModelEngine.load(config, "bench", b"bench".ljust(32))
    tokenizer = ModelTokenizer.load(model_path)
    schema = json.dumps({
        "type": "object", "additionalProperties": False, "required": list(_KEYS),
        "properties": {key: {"type": "string", "pattern": "^[a-z]{3,12}$"} for key in _KEYS}})
    ids = tokenizer.encode("Describe the order as JSON:", add_special_tokens=True)
    assert engine.grammar_compiler is not None
    rates = {}
    for constrained in (True, False):
        grammar = StructuredOutputsParams(json=schema).to_grammar() if constrained else None
        params = SamplingParams(
            max_tokens=48 if quick else 96, temperature=0.0, grammar=grammar, ignore_eos=not constrained)
        state = engine.grammar_compiler.compile(grammar) if grammar else None
        engine.core.add(EngineRequest(str(constrained), ids, params), state)
        started, drawn = time.perf_counter(), list[int]()
        while engine.core.has_work:
            for output in engine.core.step():
                drawn.extend(output.new_token_ids)
        rates[constrained] = len(tokenizer.decode(drawn, skip_special_tokens=True)) / (time.perf_counter() - started)
    return [Figure("JSON with long fixed keys", rates[True], "chars/s", "unconstrained", rates[False],
                   rates[True] / rates[False])]
