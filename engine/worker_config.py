"""What every worker with an engine can be told."""

from __future__ import annotations

from pydantic import Field

from common.config import ServiceConfig


class WorkerConfig(ServiceConfig):
    """One model, one engine, one device."""

    model_path: str = Field(description="folder with config.json and safetensors", min_length=1)
    model_name: str = Field("", description="name clients use; empty: the folder's name")
    runner: str = Field(
        "torch", pattern="^(torch|mock-echo|mock-hash)$",
        description="torch computes the model; the mocks invent tokens and are for tests alone")
    engine_process: bool = Field(
        True, description="run the engine in its own process; false: in a thread of this one, for tests")
    mock_step_s: float = Field(0.0, ge=0, le=10, description="mock runners: seconds a step takes")
    dtype: str = Field(
        "auto", pattern="^(auto|float32|bfloat16)$", description="auto: float32 on the CPU, bfloat16 on a GPU")
    device: str = Field(
        "cpu", pattern="^(cpu|cuda|cuda:[0-9]{1,3}|auto)$",
        description="where the model runs: cpu, cuda (the first GPU), cuda:N, or auto: a GPU where there is one")
    torch_threads: int = Field(1, ge=1, le=1024, description="threads of a matrix product; 1 where workers share cores")
    block_size: int = Field(0, ge=0, le=256, description="token slots of a KV block; 0: 16 on the CPU, 64 on a GPU")
    kv_cache_bytes: int = Field(1 << 30, ge=1 << 16, description="CPU: memory for the KV cache")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="GPU: part of its memory for weights, graphs, activations and the KV cache")
    num_blocks: int = Field(
        0, ge=0, description="KV blocks; 0: as many as kv_cache_bytes or gpu_memory_utilization allow")
    max_model_len: int = Field(0, ge=0, description="prompt + output tokens of a request; 0: the model's context")
    max_num_seqs: int = Field(
        0, ge=0, le=4096, description="requests that run at once; 0: 64 on the CPU, 256 on a GPU")
    max_num_batched_tokens: int = Field(
        0, ge=0, le=1 << 20, description="token budget of a step; 0: 512 on the CPU, 8192 on a GPU")
    max_num_waiting: int = Field(256, ge=1, le=1 << 20, description="requests that may wait; one more is refused")
    enable_prefix_caching: bool = Field(True, description="reuse the KV of shared prefixes")
    enable_overlap: bool = Field(True, description="plan and launch a step while the one before runs")
    headroom_fraction: float = Field(
        0.01, ge=0, lt=1, description="of the KV blocks, that no admission takes while anything runs")
    min_prefill_fraction: float = Field(
        0.1, ge=0, lt=1, description="of the token budget, kept for prompts however many answers run")
    metrics_compat: str = Field(
        "vllm", pattern="^(vllm|none)$", description="vllm: metrics also under the names that vLLM's dashboards know")
    load_interval_s: float = Field(0.5, gt=0, le=60, description="how often the load is published")
    shm_dir: str = Field("", description="folder in memory for KV shared with this host; empty: /dev/shm/shoal-<uid>")
    store_policy: str = Field(
        "all", pattern="^(all|none)$", description="what is written back to the KV store: all cached blocks, or none")
    store_flush_s: float = Field(5.0, ge=0, le=600, description="how long a stop waits for the write-back")
