"""vLLM 0.25.1 on one H200 with the same requests and random weights, and what is demanded of us.

Measured with torch 2.11 and CUDA 13, prefix caching on, bfloat16, temperature 1, all else by its defaults: figures of
the same kind of machine, not of the same run.
"""

from __future__ import annotations

from typing import Final

from bench.figures import Figure

NAME: Final = "vllm 0.25.1"
_LESS_IS_BETTER: Final = frozenset({"ms", "s"})

# shape → figure → (vLLM's value, the demanded value or None)
_VALUES: Final[dict[str, dict[str, tuple[float, float | None]]]] = {
    "qwen3-8b": {
        "decode step, B=1": (5.235, 5.0), "decode step, B=8": (5.713, None), "decode step, B=32": (6.713, 6.4),
        "decode step, B=64": (8.299, None), "decode step, B=128": (11.649, 10.5), "decode step, B=256": (19.468, 17.2),
        "prefill 32 x 512": (42_721, None), "prefill 16 x 2048": (41_894, None), "prefill 8 x 8192": (37_491, 37_000),
        "prefill 1 x 2048": (52.35, 52.5), "prefill 1 x 8192": (223.4, None), "prefill 1 x 16384": (494.9, None),
        "mixed": (10_871, 11_500), "shared prefix, cold": (2.274, 2.2), "shared prefix, warm": (1.531, None),
        "poisson 4/s, TTFT p50": (40.5, None), "poisson 4/s, TTFT p99": (99.0, None),
        "poisson 4/s, ITL p50": (5.69, None), "poisson 4/s, ITL p99": (29.2, None),
        "poisson 4/s, TPOT p99": (7.30, None), "poisson 4/s, good": (1.0, None),
        "poisson 16/s, TTFT p50": (52.1, None), "poisson 16/s, TTFT p99": (186.4, None),
        "poisson 16/s, ITL p50": (7.28, None), "poisson 16/s, ITL p99": (43.1, None),
        "poisson 16/s, TPOT p99": (17.80, None), "poisson 16/s, good": (1.0, None),
        "poisson 32/s, TTFT p50": (43.4, None), "poisson 32/s, TTFT p99": (3576, None),
        "poisson 32/s, ITL p50": (8.96, None), "poisson 32/s, ITL p99": (58.1, None),
        "poisson 32/s, TPOT p99": (40.62, None), "poisson 32/s, good": (0.5736, None),
        "poisson 48/s, TTFT p50": (5806, None), "poisson 48/s, TTFT p99": (16_348, None),
        "poisson 48/s, ITL p50": (21.68, None), "poisson 48/s, ITL p99": (59.5, None),
        "poisson 48/s, TPOT p99": (35.63, None), "poisson 48/s, good": (0.1037, None),
        "64 streams alone, TTFT p50": (44.7, None), "64 streams alone, ITL p50": (7.19, None),
        "64 streams alone, ITL p99": (8.60, None),
        "64 streams beside 16k prompts, TTFT p50": (223.7, None),
        "64 streams beside 16k prompts, ITL p50": (7.53, None), "64 streams beside 16k prompts, ITL p99": (79.1, None),
        "16k prompts, TTFT p50": (1037, None), "16k prompts, TTFT p99": (1422, None),
    },
    "qwen3-0.6b": {
        "decode step, B=1": (1.690, 1.65), "decode step, B=8": (1.851, None), "decode step, B=32": (2.738, None),
        "decode step, B=64": (3.557, None), "decode step, B=128": (5.741, None), "decode step, B=256": (10.376, 10.3),
        "prefill 32 x 512": (262_128, None), "prefill 16 x 2048": (325_335, None), "prefill 8 x 8192": (258_278, None),
        "prefill 1 x 2048": (28.0, None), "prefill 1 x 8192": (39.97, None), "prefill 1 x 16384": (94.66, None),
        "mixed": (26_388, 26_500), "shared prefix, cold": (1.146, None), "shared prefix, warm": (1.091, None),
        "poisson 4/s, TTFT p50": (36.4, None), "poisson 4/s, TTFT p99": (70.8, None),
        "poisson 4/s, ITL p50": (2.35, None), "poisson 4/s, ITL p99": (21.1, None),
        "poisson 4/s, TPOT p99": (3.50, None), "poisson 4/s, good": (1.0, None),
        "poisson 16/s, TTFT p50": (22.9, None), "poisson 16/s, TTFT p99": (80.4, None),
        "poisson 16/s, ITL p50": (2.24, None), "poisson 16/s, ITL p99": (21.9, None),
        "poisson 16/s, TPOT p99": (5.51, None), "poisson 16/s, good": (1.0, None),
        "poisson 32/s, TTFT p50": (24.9, None), "poisson 32/s, TTFT p99": (92.9, None),
        "poisson 32/s, ITL p50": (3.03, None), "poisson 32/s, ITL p99": (24.9, None),
        "poisson 32/s, TPOT p99": (9.03, None), "poisson 32/s, good": (1.0, None),
        "poisson 48/s, TTFT p50": (18.2, None), "poisson 48/s, TTFT p99": (91.5, None),
        "poisson 48/s, ITL p50": (3.29, None), "poisson 48/s, ITL p99": (21.1, None),
        "poisson 48/s, TPOT p99": (10.80, None), "poisson 48/s, good": (1.0, None),
        "64 streams alone, TTFT p50": (36.3, None), "64 streams alone, ITL p50": (2.99, None),
        "64 streams alone, ITL p99": (4.46, None),
        "64 streams beside 16k prompts, TTFT p50": (105.3, None),
        "64 streams beside 16k prompts, ITL p50": (3.12, None), "64 streams beside 16k prompts, ITL p99": (19.5, None),
        "16k prompts, TTFT p50": (133.0, None), "16k prompts, TTFT p99": (201.1, None),
    },
}


def beside_peer(shape: str, name: str, value: float, unit: str) -> Figure:
    """A figure of this run beside vLLM's, where there is one."""
    if name not in _VALUES[shape]:
        return Figure(name, value, unit)
    peer, demanded = _VALUES[shape][name]
    less_is_better = unit in _LESS_IS_BETTER
    ratio = peer / value if less_is_better else value / peer
    must = None if demanded is None else peer / demanded if less_is_better else demanded / peer
    return Figure(name, value, unit, NAME, peer, ratio, must)
