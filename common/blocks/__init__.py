"""KV bytes in host memory: what the store, hand-offs over shared memory and byte streams have in common."""
