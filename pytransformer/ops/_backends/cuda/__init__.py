"""The tier ``cuda``: CUDA C++ of csrc/cuda."""
