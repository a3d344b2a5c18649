# SPDX-License-Identifier: Apache-2.0
"""Random problems of every family but attention on every backend, and the fuzzers' coverage."""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import OPS
from pytransformer.testing import bounds
from pytransformer.testing.cases import cases
from pytransformer.testing.kits import ops
from support import fuzz_layer_norm
from support.fuzz import fuzz, fuzzers

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = [family for family in fuzzers() if family != "attention"]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_against_float64(family: str, backend: str, request: pytest.FixtureRequest) -> None:
    """Outputs and gradients are within the bound, the forced backend runs, bits repeat."""
    op = next(name for name in ops() if OPS[name].family == family)
    args, kwargs = cases(op)[0].make("cpu", torch.float32, seed=0)
    reason = pt.explain(op, *args, **kwargs).reasons[backend]
    if reason is not None:
        pytest.skip(f"backend {backend}: {reason}")
    share = 4 if backend == "cpu" else 10
    drawn, seed = (
        request.config.getoption("--fuzz-cases") // share,
        request.config.getoption("--fuzz-seed"),
    )
    report = fuzz(family, [backend], seed, range(drawn), stop_after=10)
    print(report.table(), f"\n{report.cases} cases, seed {seed}, {report.seconds:.0f} s")
    assert not report.failures, "\n".join(report.failures)


@pytest.mark.parametrize("family", fuzzers())
def test_every_feature_is_drawn(family: str) -> None:
    """Each feature is in at least a tenth of the problems, each rare one in some."""
    fuzzer = fuzzers()[family]
    drawn = [fuzzer.draw(0, case).features for case in range(600 if family == "attention" else 300)]
    shares = {
        feature: sum(feature in found for found in drawn) / len(drawn)
        for feature in (*fuzzer.features, *fuzzer.rare)
    }
    assert {
        feature: share
        for feature, share in shares.items()
        if share < (0.1 if feature in fuzzer.features else 1e-9)
    } == {}


def test_norm_gradients_have_every_stride() -> None:
    drawn = [fuzz_layer_norm.draw(0, case) for case in range(500)]
    assert {"rows_first", "step", "offset", "expanded"} <= {
        p.layouts.get("grad_out") for p in drawn
    }


def test_float16_results_beyond_the_range_are_infinite() -> None:
    """If the rounding unit is bfloat16's, -inf is right for -128,156 and wrong for -60,000."""
    exact = torch.tensor([-128_156.0, -60_000.0], dtype=torch.float64)
    ours = torch.full((2,), -torch.inf, dtype=torch.float16)
    beyond, within = bounds.coefficients(ours, exact, exact.abs(), 0.0, torch.bfloat16).tolist()
    assert beyond == 0 and within > 2
