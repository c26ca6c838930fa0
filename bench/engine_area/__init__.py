"""`shoal bench engine`: the engine on this machine beside its limits and its peers, each in the same run."""
