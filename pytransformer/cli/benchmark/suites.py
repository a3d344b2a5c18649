"""Fixed lists of problems: what `pytransformer bench --suite NAME` runs, and `pytransformer bench` alone.

aims      every case for which the project has set itself an aim on CPUs, and the other ops beside them, in under 15 minutes on two
          cores; docs/performance.md is made of its results
isa       a few of them, for comparing instruction sets: with `--isa avx2`, PyTorch held to the same set

The reference takes no part: it is the oracle, not a contender. Naive code takes none where its (Lq, Lk) tensors alone would take the
time of everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pytransformer.cli.benchmark.plan import DTYPES, Step, resized
from pytransformer.testing.cases import case

SUITE_SECONDS = 780.0  # for the steps; peaks, drawing and starting up take the rest of 15 minutes
MIN_TIME = 0.2
MOST_PAIRS = 1 << 24  # of B * Hq * Lq * Lk, for naive code
SUSTAINED = 2.0
BOTH = ("float32", "bfloat16")
MODES = ("fwd", "fwd+bwd")
REFERENCE = "reference"


def attention(length: int, head_dim: int, batch: int, heads: int) -> dict[str, int]:
    return {"B": batch, "Hq": heads, "Hkv": heads, "Lq": length, "Lk": length, "D": head_dim}


LENGTHS, HEAD_DIMS, BATCHES = (512, 1024, 2048, 4096), (64, 128), ((1, 1), (2, 4))
MASKED = ("key_padding", "window", "dropout", "bias", "t5_bias", "alibi", "segments", "bool_mask", "softcap")
_MASKS = attention(1024, 64, 2, 2)
ROWS = {"rows": 8192, "d": 1024}
OTHERS: tuple[tuple[str, dict[str, int]], ...] = (
    ("full", attention(128, 64, 16, 8)),
    *((name, _MASKS) for name in MASKED),
    ("gqa", {**_MASKS, "Hq": 8, "Hkv": 2}),
    ("varlen", attention(512, 64, 4, 4)),
    ("layer_norm", ROWS),
    ("rms_norm", ROWS),
    ("add_norm", ROWS),
    ("add_norm_dropout", ROWS),
    ("feed_forward_gelu", {"rows": 1024, "d": 512, "hidden": 2048}),
    ("feed_forward_relu", {"rows": 2048, "d": 768, "hidden": 3072}),
    ("feed_forward_swiglu", {"rows": 1024, "d": 512, "hidden": 1376}),
    ("feed_forward_recompute", {"rows": 1024, "d": 512, "hidden": 2048}),
    ("linear_cross_entropy", {"rows": 1024, "d": 512, "classes": 8192}),
)
DECODE = {"B": 1, "Hq": 32, "Hkv": 32, "Lq": 1, "Lk": 8192, "D": 128}
LONG = attention(2048, 64, 2, 4)  # where burst and sustained speed are measured


def _steps(name: str, shape: Mapping[str, int], dtypes: Sequence[str] = BOTH, modes: Sequence[str] = MODES) -> Iterator[Step]:
    found = resized(case(name, "medium"), dict(shape))
    for dtype in dtypes:
        for mode in modes:
            yield Step(found, DTYPES[dtype], mode, left_out=_left_out(found.shape))


def _left_out(shape: Mapping[str, int]) -> dict[str, str]:
    found = {REFERENCE: "the oracle takes no part in suites; --backends reference times it"}
    pairs = shape["B"] * shape["Hq"] * shape["Lq"] * shape["Lk"] if "Lq" in shape else 0
    if pairs > MOST_PAIRS:
        found["naive"] = f"{pairs / 1e6:.0f} million scores at once take too long for a suite; --shape times it"
    return found


def aims() -> Iterator[Step]:
    for name, shape in OTHERS:
        yield from _steps(name, shape)
    yield from (replace(step, cold=True) for step in _steps("decode", DECODE, modes=("fwd",)))
    for length in LENGTHS:
        for head_dim in HEAD_DIMS:
            for batch, heads in BATCHES:
                shape = attention(length, head_dim, batch, heads)
                for name in ("full", "causal"):
                    for step in _steps(name, shape):
                        long = name == "full" and shape == LONG and step.mode == "fwd"
                        yield replace(step, sustained=SUSTAINED if long else 0.0)


def isa() -> Iterator[Step]:
    for name, shape in (
        ("full", attention(1024, 64, 2, 4)),
        ("causal", attention(1024, 64, 2, 4)),
        ("full", attention(1024, 128, 2, 4)),
        ("add_norm", ROWS),
        ("feed_forward_gelu", {"rows": 1024, "d": 512, "hidden": 2048}),
        ("linear_cross_entropy", {"rows": 1024, "d": 512, "classes": 8192}),
    ):
        yield from _steps(name, shape)


SUITES = {"aims": aims, "isa": isa}
