"""Moving KV into and out of an engine: hand-off between workers, load from and write-back to the store."""
