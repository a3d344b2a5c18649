# SPDX-License-Identifier: Apache-2.0
"""--torch-seed changes a run's random numbers, also in tests that set seeds."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from pytransformer.testing.cases import case
from support.seeds import shift_seeds


def drawn() -> list[torch.Tensor]:
    """Return random numbers from each source that tests use."""
    torch.manual_seed(3)
    by_default = torch.randn(8)
    own = torch.randn(8, generator=torch.Generator().manual_seed(3))
    (query, *_), _ = case("full").make("cpu", torch.float32, seed=0)
    return [by_default, own, query]


def test_shift_changes_every_seed_and_preserves_equality(request) -> None:
    set_by_option = request.config.getoption("--torch-seed")
    try:
        runs = []
        for shift in (0, 1, 2, 1):
            shift_seeds(shift)
            runs.append(drawn())
            assert torch.equal(*runs[-1][:2]) and isinstance(
                torch.default_generator, torch.Generator
            )
        assert all(map(torch.equal, runs[1], runs[3]))
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert not any(map(torch.equal, runs[one], runs[other]))
        shift_seeds(0)
        assert all(map(torch.equal, runs[0], drawn())), "undone"
    finally:
        shift_seeds(set_by_option)


def test_child_processes_draw_like_their_test(monkeypatch) -> None:
    print_drawn = "import support, torch; torch.manual_seed(3); print(torch.randn(1).item())"
    set_by_option = os.environ.get("PYTRANSFORMER_TEST_SEED", "0")
    try:
        for shift in (0, 2):
            shift_seeds(shift)
            monkeypatch.setenv("PYTRANSFORMER_TEST_SEED", str(shift))
            there = subprocess.check_output([sys.executable, "-c", print_drawn], text=True)
            torch.manual_seed(3)
            assert float(there) == torch.randn(1).item()
    finally:
        shift_seeds(int(set_by_option))
