"""The engine's counters as Prometheus metrics, read at scrape time; and the names vLLM's dashboards expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.outputs import EngineStats


class EngineMetrics(Collector):
    """Collects from `stats()`; every series carries the model's name. `block_size` in token slots."""

    def __init__(self, stats: Callable[[], EngineStats], model: str, block_size: int) -> None:
        self._stats, self._model, self._block_size = stats, model, block_size

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        used = (stats.num_blocks - stats.num_free_blocks) / max(1, stats.num_blocks)
        for name, text, value in (
            ("shoal_requests_running", "requests with blocks", stats.num_running),
            ("shoal_requests_waiting", "requests in the queue", stats.num_waiting),
            ("shoal_kv_blocks", "KV blocks", stats.num_blocks),
            ("shoal_kv_free_blocks", "KV blocks that can be granted now, cached ones included", stats.num_free_blocks),
            ("shoal_kv_awaiting_blocks", "KV blocks reserved for content from elsewhere", stats.num_awaiting_blocks),
            ("shoal_kv_pinned_blocks", "KV blocks kept for a copy", stats.num_pinned_blocks),
            ("shoal_requests_awaiting_kv", "requests whose prompt comes from elsewhere", stats.num_awaiting),
            ("shoal_requests_held", "prompts kept until they are handed off", stats.num_held),
            ("shoal_kv_leaked_blocks", "KV blocks without an owner; must be 0", stats.num_leaked_blocks),
        ):
            yield self._gauge(name, text, value)
        for name, text, total in (
            ("shoal_engine_steps", "engine steps with work", stats.num_steps),
            ("shoal_prompt_tokens", "prompt tokens of admitted requests", stats.num_prompt_tokens),
            ("shoal_generated_tokens", "tokens drawn", stats.num_generated_tokens),
            ("shoal_preemptions", "requests put back into the queue", stats.num_preemptions),
            ("shoal_prefix_query_tokens", "prompt tokens looked up in the prefix cache", stats.prefix_queries),
            ("shoal_prefix_hit_tokens", "prompt tokens found in the prefix cache", stats.prefix_hits),
        ):
            yield self._counter(name, text, total)
        finished = CounterMetricFamily("shoal_engine_requests", "ended requests", labels=["model_name", "reason"])
        for reason, count in stats.num_finished.items():
            finished.add_metric([self._model, reason.value], count)
        yield finished
        yield from self._vllm_aliases(stats, used)

    def _vllm_aliases(self, stats: EngineStats, used: float) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "alias", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "alias", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "alias, 0 to 1", used)
        yield self._counter("vllm:prefix_cache_queries", "alias, tokens", stats.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "alias, tokens", stats.prefix_hits)
        yield self._counter("vllm:prompt_tokens", "alias", stats.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "alias", stats.num_generated_tokens)
        yield self._counter("vllm:num_preemptions", "alias", stats.num_preemptions)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "alias", labels=["model_name", "block_size", "num_gpu_blocks"])
        info.add_metric([self._model, str(self._block_size), str(stats.num_blocks)], 1)
        yield info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
