# SPDX-License-Identifier: Apache-2.0
"""Functions and classes of flash-attn, Liger-Kernel and xFormers on pytransformer's ops.

They run on any device. Change the import and keep the code:
``import pytransformer.compat.flash_attn as flash_attn``. An argument without a counterpart raises
by name; docs/compat.md has the tables.
"""

from . import flash_attn as flash_attn
from . import liger as liger
from . import xformers as xformers

__all__ = ["flash_attn", "liger", "xformers"]
