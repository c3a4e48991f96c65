"""Kernels in CUDA C++, for what Triton cannot say. `backends` lists them."""
