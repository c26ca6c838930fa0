"""What a run prints: its figures, what did not complete and why, and whether the client can be believed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.figures import Figure
from bench.serve.lag import ClientLag
from bench.serve.record import Outcome, RequestRecord
from bench.serve.summary import METRICS, Spread, Summary

_MAX_ERRORS: Final = 10
_LEAST_MS: Final = 0.001


def figures(summary: Summary, groups: dict[str, Summary], lag: ClientLag) -> list[Figure]:
    """In the format that all areas share. The client's lag has its limit as its peer."""
    done, total = summary.completed, sum(summary.outcomes.values())
    rate = summary.rate(done)
    made = [
        Figure("completed", done, "requests", "asked", total, done / total if total else None),
        Figure("duration", summary.duration_s, "s"),
        Figure("request throughput", rate, "requests/s"),
        Figure("output throughput", summary.rate(summary.total_output_tokens), "tokens/s"),
        Figure("input throughput", summary.rate(summary.total_input_tokens), "tokens/s"),
    ]
    if summary.goodput is not None:
        made.append(Figure("goodput", summary.goodput, "requests/s", "request throughput", rate,
                           summary.goodput / rate if rate else None))
    if summary.num_resent:
        made.append(Figure("sent again", summary.num_resent, "requests"))
    if summary.has_queued:
        made += _spread("wait for a slot", summary.queue)
    made += _latencies("", summary)
    for name, group in groups.items():
        made += _latencies(f"{name}: ", group)
    for name, value in (("sent late", lag.sent_p99_ms), ("event loop late", lag.loop_p99_ms)):
        made.append(Figure(f"client {name}, p99", value, "ms", "limit", lag.limit_ms,
                           lag.limit_ms / max(value, _LEAST_MS), 1.0))
    return made


def print_tables(console: Console, title: str, summary: Summary, groups: dict[str, Summary], lag: ClientLag) -> None:
    """Rates, then a row for each metric, of each group where there are several."""
    rates = Table(title=title, show_header=False)
    rates.add_row("requests completed", f"{summary.completed} of {sum(summary.outcomes.values())} "
                                        f"in {summary.duration_s:.2f} s")
    rates.add_row("requests/s", f"{summary.rate(summary.completed):.2f}")
    if summary.goodput is not None:
        rates.add_row("goodput, requests/s", f"{summary.goodput:.2f}")
    rates.add_row("tokens/s", f"{summary.rate(summary.total_output_tokens):,.1f} out, "
                              f"{summary.rate(summary.total_input_tokens):,.1f} in")
    rates.add_row("input tokens", f"{summary.total_input_tokens:,}, {summary.cached_input_tokens:,} from a cache")
    rates.add_row("most requests at once", str(summary.max_concurrent_requests))
    if summary.num_resent:
        rates.add_row("requests sent again", f"{summary.num_resent}, as the server had closed their connection")
    if summary.has_queued:
        waits = (f"p{q:g} {value:,.1f}" for q, value in summary.queue.percentiles.items())
        rates.add_row("wait for a slot, ms", f"mean {summary.queue.mean:,.1f}, {', '.join(waits)}")
    rates.add_row("client's own lag, p99", f"sent {lag.sent_p99_ms:.1f} ms late, event loop {lag.loop_p99_ms:.1f} ms")
    console.print(rates)
    latencies = Table("ms", "mean", "std", *(f"p{q:g}" for q in summary.spreads["ttft"].percentiles))
    for column in latencies.columns[1:]:
        column.justify = "right"
    for prefix, part in {"": summary, **groups}.items():
        for name in METRICS:
            spread = part.spreads[name]
            if math.isnan(spread.mean):
                continue
            latencies.add_row(f"{prefix} {name.upper()}".strip(), *(
                f"{value:,.1f}" for value in (spread.mean, spread.std, *spread.percentiles.values())))
    if latencies.row_count:
        console.print(latencies)


def print_outcomes(
    console: Console, summary: Summary, records: Sequence[RequestRecord], lag: ClientLag, stopped_by: str
) -> None:
    """Below the table."""
    if stopped_by:
        console.print(f"[yellow]ended early:[/] {escape(stopped_by)}")
    if summary.not_completed:
        console.print(f"[yellow]the percentiles are of the {summary.completed} completed requests; not in them:[/] "
                      + escape(_others(summary)))
        errors = Counter(record.error for record in records if record.error)
        for error, count in errors.most_common(_MAX_ERRORS):
            console.print(f"  {count} x {escape(error)}")
    if lag.warning:
        console.print(f"[red]warning:[/] {escape(lag.warning)}")


def _others(summary: Summary) -> str:
    parts = []
    for outcome, count in summary.outcomes.items():
        if outcome is Outcome.REFUSED:
            codes = ", ".join(f"{n} x {status}" for status, n in sorted(summary.refused_by_status.items()))
            parts.append(f"{count} refused ({codes})")
        elif outcome is not Outcome.COMPLETED:
            parts.append(f"{count} {outcome.value}")
    return ", ".join(parts)


def _latencies(prefix: str, summary: Summary) -> list[Figure]:
    made = []
    for name in METRICS:
        spread = summary.spreads[name]
        if not math.isnan(spread.mean):
            made += _spread(f"{prefix}{name.upper()}", spread)
    return made


def _spread(name: str, spread: Spread) -> list[Figure]:
    return [Figure(f"{name} mean", spread.mean, "ms"),
            *(Figure(f"{name} p{q:g}", value, "ms") for q, value in spread.percentiles.items())]
