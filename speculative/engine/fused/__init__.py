"""A plain decoder's step on CUDA in six Triton kernels a layer."""
