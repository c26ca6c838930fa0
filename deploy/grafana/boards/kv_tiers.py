"""Where KV lies, who owns it, and how much of the prompts it saves."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Panel, Query, Row
from deploy.grafana.promql import AT, EACH, WORKER, quantile, rate, total

_SOURCES = rate("shoal_prompt_tokens_by_source_total", "source", WORKER)
_ALL = rate("shoal_prompt_tokens_by_source_total", "", WORKER)

_HITS = Row("Hits", (
    Panel("Prompt tokens by source", "Share of prompt tokens of decode workers: found on the device, loaded from the "
          "store, received from a prefill worker, or computed here.",
          (Query(f"{_SOURCES} / ignoring (source) group_left () ({_ALL})", "{{source}}"),), "percentunit", width=12,
          stacked=True, maximum=1),
    Panel("Hit rate", "Token-weighted: what a prefix cache answered of what was asked.",
          (Query(f"{rate('shoal_prefix_hit_tokens_total', 'job', WORKER)} / "
                 f"{rate('shoal_prefix_query_tokens_total', 'job', WORKER)}", "device, {{job}}"),
           Query("sum(rate(shoal_kvstore_hits_total[$__rate_interval])) / (sum(rate(shoal_kvstore_hits_total"
                 "[$__rate_interval])) + sum(rate(shoal_kvstore_missed_blocks_total[$__rate_interval])))", "store")),
          "percentunit", width=12, maximum=1),
))
_DEVICE = Row("Device", (
    Panel("In use", "Share of a worker's blocks that are not grantable.",
          (Query(f"1 - {total('shoal_kv_free_blocks', 'job, instance', WORKER)} / "
                 f"{total('shoal_kv_blocks', 'job, instance', WORKER)}", EACH),), "percentunit",
          warn=.85, bad=.95, maximum=1),
    Panel("Blocks by owner", "grantable: free or only cached; awaiting: reserved for a hand-off or load; in_use: of "
          "requests and copies.",
          (Query(total("shoal_kv_owned_blocks", "job, owner", WORKER), "{{job}}: {{owner}}"),), "short", stacked=True),
    Panel("Pinned, leaked", "Blocks kept for a copy (brief); blocks without an owner (never).",
          (Query(total("shoal_kv_pinned_blocks", "job", WORKER), "pinned, {{job}}"),
           Query(total("shoal_kv_leaked_blocks", "job", WORKER), "leaked, {{job}}")), "short"),
))
_STORE = Row("Store", (
    Panel("Used", "Share of each tier's bytes that blocks hold.",
          (Query("sum by (instance, tier) (shoal_kvstore_used_bytes) / sum by (instance, tier) "
                 "(shoal_kvstore_capacity_bytes > 0)", "{{instance}} {{tier}}"),), "percentunit", warn=.9, maximum=1),
    Panel("Blocks", "Blocks in each tier; one that is in both counts in both.",
          (Query("sum by (tier) (shoal_kvstore_blocks)", "{{tier}}"),), "short"),
    Panel("Evicted", "Blocks taken out of a tier per second.",
          (Query("sum by (tier) (rate(shoal_kvstore_evicted_blocks_total[$__rate_interval]))", "{{tier}}"),), "short"),
    Panel("Leased by tier", "Blocks given to readers, by the tier they were in; and blocks asked for in vain.",
          (Query("sum by (tier) (rate(shoal_kvstore_hits_total[$__rate_interval]))", "hit, {{tier}}"),
           Query("sum(rate(shoal_kvstore_missed_blocks_total[$__rate_interval]))", "missed")), "short", stacked=True),
    Panel("In hand", "Blocks that readers hold, slots being written, blocks on their way to SSD, slots of writers "
          "that vanished.",
          (Query("sum(shoal_kvstore_leased_blocks)", "leased"), Query("sum(shoal_kvstore_held_blocks)", "held"),
           Query("sum(shoal_kvstore_unwritten_blocks)", "unwritten"),
           Query("sum(shoal_kvstore_quarantined_blocks)", "quarantined")), "short"),
    Panel("Faults", "Blocks with wrong bytes (they count as misses), failed disk calls, puts that ran out of time.",
          (Query("sum(increase(shoal_kvstore_corrupt_blocks_total[$__rate_interval]))", "corrupt"),
           Query("sum(increase(shoal_kvstore_disk_errors_total[$__rate_interval]))", "disk errors"),
           Query("sum(increase(shoal_kvstore_expired_puts_total[$__rate_interval]))", "expired puts")), "short", bad=1),
))
_TRAFFIC = Row("Between workers and store", (
    Panel("Bytes", "KV loaded from the store and written back to it.",
          (Query(rate("shoal_kv_store_loaded_bytes_total", "job"), "load, {{job}}"),
           Query(rate("shoal_kv_store_written_bytes_total", "job"), "write, {{job}}")), "Bps"),
    Panel("Time of a load or write", "95th percentile of one call.",
          (Query(quantile(.95, "shoal_kv_copy_seconds", "direction", f'{AT},transport="store"'), "{{direction}}"),),
          "s"),
    Panel("Left out", "Loads that would have been slower than computing, and blocks that were not written back.",
          (Query(rate("shoal_kv_store_declined_total"), "loads declined"),
           Query(rate("shoal_kv_store_dropped_blocks_total"), "blocks dropped")), "short"),
))

KV_TIERS = Dashboard(
    "shoal-kv-tiers", "shoal: KV tiers", "Device, store memory and SSD: hits, owners, traffic.",
    (_HITS, _DEVICE, _STORE, _TRAFFIC), jobs="prefill|decode|kvstore",
    model_values="label_values(shoal_kv_blocks, model_name)")
