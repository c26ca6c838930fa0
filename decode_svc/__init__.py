"""Decode worker: continuous batching on a paged KV cache; computes its prompts itself when nobody else does."""
