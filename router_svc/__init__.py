"""Places requests: a global prefix index, measured loads, and a price in seconds for every candidate."""
