# SPDX-License-Identifier: Apache-2.0
"""Hooks into other libraries; each module imports its library on first use."""

from . import torch as torch
from . import transformers as transformers
from .convert import Conversion, convert, revert

__all__ = ["Conversion", "convert", "revert", "torch", "transformers"]
