# SPDX-License-Identifier: Apache-2.0
"""rotary and append_kv in benches: under pytest-benchmark (bench/conftest.py)."""

from __future__ import annotations


def test_speed(timed) -> None:
    timed()
