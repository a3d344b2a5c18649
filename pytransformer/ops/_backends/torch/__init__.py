"""The tier ``torch``: PyTorch's own fused kernels, called by their aten ops."""
