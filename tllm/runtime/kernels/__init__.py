"""Triton kernels, each beside the PyTorch reference it is tested against."""
