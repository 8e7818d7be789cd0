"""The Triton kernels behind `triton_backend`: grouped GEMM, weight gradient, row movement, activations, launch."""
