# SPDX-License-Identifier: Apache-2.0
"""Every op by its name: apart from the registry, so that what the registry builds an op of can look one up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .registry import Op

OPS: dict[str, Op] = {}
