"""A decode worker's request times as Prometheus metrics, under our names and those that vLLM's dashboards know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from decode_svc.request_meter import RequestCounts

# field, our name, vLLM's name, text
_HISTOGRAMS: Final = (
    ("ttft", "shoal_worker_ttft_seconds", "time_to_first_token_seconds",
     "request received by this worker to its first token"),
    ("itl", "shoal_worker_itl_seconds", "inter_token_latency_seconds",
     "gap between two engine steps, once for each request that got a token in both"),
    ("tpot", "shoal_worker_tpot_seconds", "request_time_per_output_token_seconds",
     "mean time per output token of a request, after its first"),
    ("e2e", "shoal_worker_e2e_seconds", "e2e_request_latency_seconds", "request received to its end"),
    ("queue", "shoal_worker_queue_seconds", "request_queue_time_seconds", "submitted to first admitted"),
    ("prefill", "shoal_worker_prefill_seconds", "request_prefill_time_seconds",
     "received to first token without the queue: hand-off, loads and own prefill"),
    ("decode", "shoal_worker_decode_seconds", "request_decode_time_seconds", "first token to the last"),
    ("inference", "shoal_worker_inference_seconds", "request_inference_time_seconds", "received to end, no queue"),
    ("prompt_tokens", "shoal_worker_request_prompt_tokens", "request_prompt_tokens", "prompt tokens of a request"),
    ("output_tokens", "shoal_worker_request_output_tokens", "request_generation_tokens", "output tokens of a choice"),
    ("computed_tokens", "shoal_worker_request_computed_tokens", "request_prefill_kv_computed_tokens",
     "prompt tokens of a request whose KV this worker computed"),
    ("max_tokens", "shoal_worker_request_max_tokens", "request_params_max_tokens", "output limit of a request"),
    ("choices", "shoal_worker_request_choices", "request_params_n", "choices of a request"),
)
_VLLM_SOURCES: Final = {"computed": "local_compute", "device": "local_cache_hit"}  # all others are external


class RequestMetrics(Collector):
    """`vllm_names`: publish the aliases too, with the label `engine` that vLLM has."""

    def __init__(self, counts: RequestCounts, model: str, *, vllm_names: bool) -> None:
        self._counts, self._model, self._vllm_names = counts, model, vllm_names

    def describe(self) -> list[Metric]:
        """None ahead of time: a test may hold several workers in one process."""
        return []

    def collect(self) -> Iterator[Metric]:
        for field, name, _, text in _HISTOGRAMS:
            yield self._histogram(field, name, text, ("model_name",), (self._model,))
        yield self._histogram("step_rows", "shoal_worker_step_outputs", "requests that a step brought something for",
                              ("model_name",), (self._model,))
        sources = CounterMetricFamily(
            "shoal_prompt_tokens_by_source", "prompt tokens by where their KV came from",
            labels=["model_name", "source"])
        for source, tokens in self._counts.tokens_by_source.items():
            sources.add_metric([self._model, source], tokens)
        yield sources
        refused = CounterMetricFamily(
            "shoal_worker_refused", "requests answered with an error, by code", labels=["model_name", "code"])
        for code, count in list(self._counts.refused.items()):
            refused.add_metric([self._model, code], count)
        yield refused
        if self._vllm_names:
            yield from self._vllm()

    def _vllm(self) -> Iterator[Metric]:
        labels = (self._model, "0")
        for field, _, name, text in _HISTOGRAMS:
            yield self._histogram(field, f"vllm:{name}", text, ("model_name", "engine"), labels)
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "alias", labels=["model_name", "engine", "source"])
        sums = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        for source, tokens in self._counts.tokens_by_source.items():
            sums[_VLLM_SOURCES.get(source, "external_kv_transfer")] += tokens
        for source, tokens in sums.items():
            by_source.add_metric([*labels, source], tokens)
        yield by_source
        external, cached = sums["external_kv_transfer"], sums["local_cache_hit"] + sums["external_kv_transfer"]
        for name, total in (
            ("prompt_tokens_cached", cached), ("external_prefix_cache_hits", external),
            ("external_prefix_cache_queries", external + sums["local_compute"]),
        ):
            family = CounterMetricFamily(f"vllm:{name}", "alias, tokens", labels=["model_name", "engine"])
            family.add_metric(labels, total)
            yield family
        rejected = CounterMetricFamily("vllm:admission_rejections", "alias", labels=["model_name", "engine", "reason"])
        for code, count in list(self._counts.refused.items()):
            rejected.add_metric([*labels, code], count)
        yield rejected

    def _histogram(
        self, field: str, name: str, text: str, label_names: tuple[str, ...], labels: tuple[str, ...]
    ) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=label_names)
        getattr(self._counts, field).add_to(family, labels)
        return family
