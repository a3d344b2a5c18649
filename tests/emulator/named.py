# SPDX-License-Identifier: Apache-2.0
"""The fuzzers' problems by name, for run_problems.py."""

from __future__ import annotations

from typing import Any


class Named:
    def __init__(self, name: str, problem: Any) -> None:
        self.name, self.problem = name, problem

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"
