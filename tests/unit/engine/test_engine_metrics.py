"""The engine's counters under our names and, where asked, vLLM's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from engine.engine_metrics import EngineMetrics
from engine.outputs import EngineStats, FinishReason


def registry(*, vllm_names: bool) -> CollectorRegistry:
    stats = EngineStats(
        num_running=3, num_waiting=2, num_awaiting=1, num_awaiting_blocks=10, num_held=4, num_blocks=100,
        num_free_blocks=60, num_prompt_tokens=7)
    stats.num_finished[FinishReason.STOP] = 5
    stats.num_finished[FinishReason.ERROR] = 6
    made = CollectorRegistry()
    made.register(EngineMetrics(lambda: stats, "m", 16, stages=lambda: {"admitting": 8}, vllm_names=vllm_names))
    return made


def test_owners_of_blocks_sum_to_the_pool_and_stages_hold_the_services_own() -> None:
    made = registry(vllm_names=True)
    owners = [made.get_sample_value("shoal_kv_owned_blocks", {"model_name": "m", "owner": owner})
              for owner in ("grantable", "awaiting", "in_use")]
    assert owners == [60, 10, 30]
    stages = {stage: made.get_sample_value("shoal_stage_requests", {"model_name": "m", "stage": stage})
              for stage in ("waiting", "running", "awaiting_kv", "held", "admitting")}
    assert stages == {"waiting": 2, "running": 3, "awaiting_kv": 1, "held": 4, "admitting": 8}


def test_aliases_carry_the_engine_label_and_only_good_ends_are_successes() -> None:
    made = registry(vllm_names=True)
    labels = {"model_name": "m", "engine": "0"}
    assert made.get_sample_value("vllm:num_requests_waiting", labels) == 2
    assert made.get_sample_value("vllm:num_requests_waiting_by_reason", {**labels, "reason": "deferred"}) == 1
    assert made.get_sample_value("vllm:kv_cache_usage_perc", labels) == .4
    assert made.get_sample_value("vllm:request_success_total", {**labels, "finished_reason": "stop"}) == 5
    assert made.get_sample_value("vllm:request_success_total", {**labels, "finished_reason": "error"}) is None
    assert made.get_sample_value(
        "vllm:cache_config_info", {**labels, "block_size": "16", "num_gpu_blocks": "100"}) == 1


def test_without_the_aliases_no_name_is_vllms() -> None:
    names = {sample.name for family in registry(vllm_names=False).collect() for sample in family.samples}
    assert names
    assert not [name for name in names if name.startswith("vllm")]
