"""The KV store service: content-addressed, immutable KV blocks in DRAM and on SSD."""
