"""Random norms, feed-forward networks and cross entropies against float64 on every backend."""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt
from pytransformer.testing import fuzz_cross_entropy, fuzz_feed_forward, fuzz_layer_norm
from pytransformer.testing.fuzz import fuzz

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("op", ["layer_norm", "feed_forward", "cross_entropy"])
def test_against_float64(op: str, backend: str, request: pytest.FixtureRequest) -> None:
    """Outputs and every gradient within the bound; the forced backend ran; equal bits twice."""
    reason = pt.explain("layer_norm", torch.zeros(1, 8), 8).reasons[backend]
    if reason is not None:
        pytest.skip(f"backend {backend}: {reason}")
    cases, seed = (
        request.config.getoption("--fuzz-cases") // (4 if backend == "cpu" else 10),
        request.config.getoption("--fuzz-seed"),
    )
    report = fuzz(op, [backend], seed, range(cases), stop_after=10)
    print(report.table(), f"\n{report.cases} cases, seed {seed}, {report.seconds:.0f} s")
    assert not report.failures, "\n".join(report.failures)


def test_every_kind_of_layer_norm_is_drawn() -> None:
    drawn = [fuzz_layer_norm.draw(0, case) for case in range(500)]
    features = set().union(*(p.features for p in drawn))
    assert {
        "layer_norm",
        "rms_norm",
        "add_norm",
        "residual",
        "weight",
        "bias",
        "dropout_p",
        "mixed",
        "offset",
        "3d",
    } <= features
    for keyword in ("residual", "dropout_p", "bias", "offset", "mixed", "grad_residual_out"):
        share = sum(keyword in p.features for p in drawn) / len(drawn)
        assert share >= 0.1, f"{keyword} is in {share:.1%} of the cases"
    assert {"rows_first", "step", "offset", "expanded"} <= {p.layouts.get("grad_out") for p in drawn}


def test_every_kind_of_feed_forward_is_drawn() -> None:
    drawn = [fuzz_feed_forward.draw(0, case) for case in range(300)]
    for feature in (
        *fuzz_feed_forward.ACTIVATIONS,
        "b1",
        "b2",
        "gate_weight",
        "gate_bias",
        "dropout_p",
        "recompute",
        "strided",
        "positive",
        "large",
    ):
        share = sum(feature in p.features for p in drawn) / len(drawn)
        assert share >= 0.1, f"{feature} is in {share:.1%} of the cases"


def test_every_kind_of_cross_entropy_is_drawn() -> None:
    drawn = [fuzz_cross_entropy.draw(0, case) for case in range(300)]
    for feature in (
        *fuzz_cross_entropy.REDUCTIONS,
        "bias",
        "ignore_index",
        "ignored",
        "label_smoothing",
        "strided",
        "positive",
        "large",
    ):
        share = sum(feature in p.features for p in drawn) / len(drawn)
        assert share >= 0.1, f"{feature} is in {share:.1%} of the cases"
    assert any("ignored_nan" in p.features for p in drawn)
