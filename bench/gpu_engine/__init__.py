"""`shoal bench engine --shape`: the engine on a GPU with the shape of a model and random weights, beside vLLM."""
