"""`shoal bench kernels`: each kernel beside its floor and, where there is one, a library's kernel, in the same run."""
