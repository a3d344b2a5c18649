# SPDX-License-Identifier: Apache-2.0
"""Hooks into other libraries. Each module imports its library only when it is asked to."""

from . import torch as torch
from . import transformers as transformers
from .convert import Conversion, convert, revert

__all__ = ["Conversion", "convert", "revert", "torch", "transformers"]
