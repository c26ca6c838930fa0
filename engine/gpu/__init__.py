"""The engine on an NVIDIA GPU: the same plans, computed by Triton kernels and cuBLAS, decode steps in CUDA graphs."""
