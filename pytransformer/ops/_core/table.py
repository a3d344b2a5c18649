# SPDX-License-Identifier: Apache-2.0
"""Every op by name, separate from the registry to avoid an import cycle."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .registry import Op

OPS: dict[str, Op] = {}
