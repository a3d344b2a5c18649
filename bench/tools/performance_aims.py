# SPDX-License-Identifier: Apache-2.0
"""What the CPU kernels promise, and how far committed results keep it. Used by performance.py."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from speed_pairs import Pair, Row, pairs, table, times  # beside this file

GRID = ("full", "causal")
TILES = "amx_bf16"


class Aim(NamedTuple):
    """A promise: of which rows, compared with what, and the smallest ratio that keeps it."""

    what: str
    of: tuple[str, ...]  # cases or ops
    dtypes: tuple[str, ...]
    least: float
    peak: str = ""  # the key of the peak whose share counts; else PyTorch's time over ours
    modes: tuple[str, ...] = ("fwd", "fwd+bwd")
    shortest: int = 0  # keys from which on a row counts
    on_tiles: float | None = None  # the smallest ratio with AMX


F32, BF16 = ("float32",), ("bfloat16",)
AIMS = (
    Aim("attention fp32, L >= 1024, of a matrix product's rate", GRID, F32, 0.95, "tflops", shortest=1024),
    Aim("attention bf16, L >= 1024, of a matrix product's rate", GRID, BF16, 0.9, "tflops", shortest=1024, on_tiles=0.75),
    Aim("attention, every case, over PyTorch", ("attention", "attention_varlen"), F32 + BF16, 1.0),
    Aim("decoding, of read bandwidth", ("decode",), F32 + BF16, 0.85, "read_gbps", ("fwd",)),
    Aim("layer_norm and add_norm, the call, over `F.layer_norm`", ("layer_norm", "add_norm"), F32 + BF16, 1.5),
    Aim("feed_forward and linear_cross_entropy fp32, over PyTorch", ("feed_forward", "linear_cross_entropy"), F32, 1.0),
    Aim("feed_forward and linear_cross_entropy bf16, over PyTorch", ("feed_forward", "linear_cross_entropy"), BF16, 1.0),
)


def aims(document: Row, found: list[Pair], avx2: Row | None) -> str:
    tiles = document.get("environment", {}).get("isa") == TILES
    rows = []
    for aim in AIMS:
        least = aim.on_tiles if tiles and aim.on_tiles is not None else aim.least
        rows.append([aim.what, *_cells(_values(aim, document, found), least, bool(aim.peak))])
    held = [p.ratio for p in pairs(avx2) if p.ratio is not None] if avx2 else []
    rows.append(["every op held to AVX2, PyTorch too", *_cells(held, 0.9, False)])
    return table(("what", "aim", "least", "median", "most", "aim met by"), rows)


def _values(aim: Aim, document: Row, found: list[Pair]) -> list[float]:
    values: list[float | None] = []
    for p in found:
        o = p.ours
        if not {o["op"], o["case"]} & set(aim.of) or o["dtype"] not in aim.dtypes or o["mode"] not in aim.modes:
            continue
        if o["shape"].get("Lk", aim.shortest) < aim.shortest:
            continue
        values.append(_share(o, document, aim.peak) if aim.peak else p.ratio)
    return [v for v in values if v is not None]


def _share(row: Row, document: Row, key: str) -> float | None:
    whole: Any = (document.get("peaks") or {}).get(key)
    whole = whole.get(row["dtype"]) if isinstance(whole, dict) else whole
    return row["tflops" if key == "tflops" else "gbps"] / whole if whole else None


def _cells(values: list[float], least: float, share: bool) -> list[str]:
    if not values:
        return [f"{least:.0%}" if share else f"{least:g}", *["–"] * 4]
    figures = (min(values), median(values), max(values))
    shown = [f"{v:.0%}" for v in figures] if share else [times(v) for v in figures]
    return [f"{least:.0%}" if share else f"{least:g}", *shown, f"{sum(v >= least for v in values)} of {len(values)}"]
