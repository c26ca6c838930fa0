"""Triton kernels, one per file: reference in plain torch, kernel, launcher. Imports nothing of ours."""
