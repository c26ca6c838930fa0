"""The few forms of PromQL that the dashboards use, with the selection that their variables make."""

from __future__ import annotations

AT = 'job=~"$job",instance=~"$instance"'
GATEWAY = f'{AT},model=~"$model_name"'
WORKER = f'{AT},model_name=~"$model_name"'
WINDOW = "$__rate_interval"
EACH = "{{job}} {{instance}}"  # legend of a series per process


def rate(counter: str, by: str = "", select: str = AT) -> str:
    """Per second, summed over all but the labels in `by`."""
    over = f" by ({by})" if by else ""
    return f"sum{over} (rate({counter}{{{select}}}[{WINDOW}]))"


def increase(counter: str, by: str = "", select: str = AT) -> str:
    over = f" by ({by})" if by else ""
    return f"sum{over} (increase({counter}{{{select}}}[{WINDOW}]))"


def total(gauge: str, by: str = "", select: str = AT) -> str:
    over = f" by ({by})" if by else ""
    return f"sum{over} ({gauge}{{{select}}})"


def quantile(q: float, histogram: str, by: str = "", select: str = AT) -> str:
    """Of a histogram, given without `_bucket`."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q:g}, {rate(f'{histogram}_bucket', labels, select)})"


def mean(histogram: str, by: str = "", select: str = AT) -> str:
    return f"{rate(f'{histogram}_sum', by, select)} / {rate(f'{histogram}_count', by, select)}"


def buckets(histogram: str, select: str = AT) -> str:
    """What a heatmap shows."""
    return increase(f"{histogram}_bucket", "le", select)
