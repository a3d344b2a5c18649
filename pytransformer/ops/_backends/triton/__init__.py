"""The tier ``triton``: the kernels of kernels/."""
