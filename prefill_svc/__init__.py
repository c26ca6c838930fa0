"""Prefill worker: computes prompt KV and pushes it to decode workers; keeps nothing but its cache."""
