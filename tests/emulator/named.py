# SPDX-License-Identifier: Apache-2.0
"""Problems of the fuzzers with names, as run_problems.py wants them."""

from __future__ import annotations

from typing import Any


class Named:
    def __init__(self, name: str, problem: Any) -> None:
        self.name, self.problem = name, problem

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"
