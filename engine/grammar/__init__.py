"""Structured output: what a grammar allows next, and the masks that say it to the sampler. Torch-free."""
