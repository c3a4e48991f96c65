"""What kernels for GPUs need whatever language they are in: NVIDIA's driver and compiler."""
