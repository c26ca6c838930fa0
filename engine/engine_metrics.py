"""The engine's counters as Prometheus metrics, read at scrape time; and the names vLLM's dashboards expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.outputs import EngineStats, FinishReason

_WELL = (FinishReason.STOP, FinishReason.LENGTH)


class EngineMetrics(Collector):
    """Collects from `stats()`; every series carries the model's name. `block_size` in token slots.

    `stages` counts requests that are here but not, or not only, in the engine's own stages (`waiting`, `running`,
    `awaiting_kv`, `held`). `vllm_names`: publish the aliases too, with the label `engine` that vLLM has.
    """

    def __init__(
        self, stats: Callable[[], EngineStats], model: str, block_size: int, *,
        stages: Callable[[], Mapping[str, int]] = dict, vllm_names: bool = True,
    ) -> None:
        self._stats, self._model, self._block_size = stats, model, block_size
        self._stages, self._vllm_names = stages, vllm_names

    def describe(self) -> list[Metric]:
        """None ahead of time: a test may hold several workers in one process."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from self._gauges(stats)
        yield from self._by_label(stats)
        for name, text, total in (
            ("shoal_engine_steps", "engine steps with work", stats.num_steps),
            ("shoal_prompt_tokens", "prompt tokens of admitted requests", stats.num_prompt_tokens),
            ("shoal_generated_tokens", "tokens drawn", stats.num_generated_tokens),
            ("shoal_preemptions", "requests put back into the queue", stats.num_preemptions),
            ("shoal_recomputed_tokens", "tokens computed again after a preemption", stats.num_recomputed_tokens),
            ("shoal_kv_swapped_out_blocks", "KV blocks of preempted requests that a lower tier kept",
             stats.num_swapped_out_blocks),
            ("shoal_kv_swapped_in_blocks", "those of them that came back", stats.num_swapped_in_blocks),
            ("shoal_wasted_rows", "rows computed for requests that had ended", stats.num_wasted_rows),
            ("shoal_prefix_query_tokens", "prompt tokens looked up in the prefix cache", stats.prefix_queries),
            ("shoal_prefix_hit_tokens", "prompt tokens found in the prefix cache", stats.prefix_hits),
        ):
            yield self._counter(name, text, total)
        finished = CounterMetricFamily("shoal_engine_requests", "ended requests", labels=["model_name", "reason"])
        for reason, count in stats.num_finished.items():
            finished.add_metric([self._model, reason.value], count)
        yield finished
        if self._vllm_names:
            yield from self._vllm(stats)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("shoal_requests_running", "requests with blocks", stats.num_running),
            ("shoal_requests_waiting", "requests in the queue", stats.num_waiting),
            ("shoal_waiting_tokens", "tokens to compute before all requests here can draw", stats.num_waiting_tokens),
            ("shoal_kv_blocks", "KV blocks", stats.num_blocks),
            ("shoal_kv_free_blocks", "KV blocks that can be granted now, cached ones included", stats.num_free_blocks),
            ("shoal_kv_awaiting_blocks", "KV blocks reserved for content from elsewhere", stats.num_awaiting_blocks),
            ("shoal_kv_pinned_blocks", "KV blocks kept for a copy", stats.num_pinned_blocks),
            ("shoal_requests_awaiting_kv", "requests whose prompt comes from elsewhere", stats.num_awaiting),
            ("shoal_requests_held", "prompts kept until they are handed off", stats.num_held),
            ("shoal_kv_leaked_blocks", "KV blocks without an owner; must be 0", stats.num_leaked_blocks),
            ("shoal_engine_step_seconds", "duration of a step with work, smoothed; 0: unknown", stats.step_s),
            ("shoal_engine_prefill_tokens_per_second", "prompt tokens computed per second of steps that compute many, "
             "smoothed; 0: unknown", stats.prefill_tokens_per_s),
        ):
            yield self._gauge(name, text, value)

    def _by_label(self, stats: EngineStats) -> Iterator[Metric]:
        stages = GaugeMetricFamily(
            "shoal_stage_requests", "requests in each stage of this worker", labels=["model_name", "stage"])
        own = {"waiting": stats.num_waiting, "running": stats.num_running, "awaiting_kv": stats.num_awaiting,
               "held": stats.num_held}
        for stage, count in {**own, **self._stages()}.items():
            stages.add_metric([self._model, stage], count)
        yield stages
        owners = GaugeMetricFamily(
            "shoal_kv_owned_blocks", "KV blocks of this device by owner: grantable (free or only cached), awaiting KV "
            "from elsewhere, or in use by requests and copies; they sum to shoal_kv_blocks",
            labels=["model_name", "owner"])
        in_use = stats.num_blocks - stats.num_free_blocks - stats.num_awaiting_blocks
        for owner, count in (("grantable", stats.num_free_blocks), ("awaiting", stats.num_awaiting_blocks),
                             ("in_use", max(0, in_use))):
            owners.add_metric([self._model, owner], count)
        yield owners

    def _vllm(self, stats: EngineStats) -> Iterator[Metric]:
        used = (stats.num_blocks - stats.num_free_blocks) / max(1, stats.num_blocks)
        for name, value in (
            ("num_requests_running", stats.num_running), ("num_requests_waiting", stats.num_waiting),
            ("kv_cache_usage_perc", used),
        ):
            yield self._labelled(GaugeMetricFamily, name, (), [((), value)])
        yield self._labelled(GaugeMetricFamily, "num_requests_waiting_by_reason", ("reason",), [
            (("capacity",), stats.num_waiting), (("deferred",), stats.num_awaiting)])
        for name, total in (
            ("prefix_cache_queries", stats.prefix_queries), ("prefix_cache_hits", stats.prefix_hits),
            ("prompt_tokens", stats.num_prompt_tokens), ("generation_tokens", stats.num_generated_tokens),
            ("num_preemptions", stats.num_preemptions),
        ):
            yield self._labelled(CounterMetricFamily, name, (), [((), total)])
        yield self._labelled(CounterMetricFamily, "request_success", ("finished_reason",), [
            ((reason.value,), count) for reason, count in stats.num_finished.items() if reason in _WELL])
        yield self._labelled(GaugeMetricFamily, "cache_config_info", ("block_size", "num_gpu_blocks"), [
            ((str(self._block_size), str(stats.num_blocks)), 1)])

    def _labelled(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, more: tuple[str, ...],
        rows: list[tuple[tuple[str, ...], float]],
    ) -> Metric:
        family = kind(f"vllm:{name}", "alias", labels=["model_name", "engine", *more])
        for values, value in rows:
            family.add_metric([self._model, "0", *values], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
