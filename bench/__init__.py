"""Measurements: each area prints a table of figures, every figure beside its peer from the same run."""
