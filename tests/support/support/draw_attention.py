# SPDX-License-Identifier: Apache-2.0
"""Random attention problems for the fuzzer: every keyword, shape, stride and special value.

The tables at the top define the values and their probabilities. A problem is a function of (seed,
case) only.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from pytransformer.testing import oracle

from .attention_problem import Problem
from .guarded import place, random_layout

LENGTHS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257)
HEAD_DIMS = (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 128, 160, 192, 256)
ODD_HEAD_DIMS = (1, 3, 7, 20, 33, 65)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPE_WEIGHTS = (32, 34, 20, 14)
DATA = {"normal": 50, "positive": 12, "offset": 13, "heavy": 13, "large_logits": 12}
PAGE_SIZES = (1, 2, 5, 7, 16, 16, 32, 64, 100)
BLOCK_SIZES = ((32, 32), (64, 64), (32, 64), (64, 32), (128, 128))
# Max (batch, head, query, key) quadruples of a problem, for a cheap float64 solution.
BUDGET = 120_000

# Probability of each keyword in a problem that is not plain. `causal` is frequent because
# `prefix_lengths` needs it.
CHANCES = {
    "attn_mask": 0.35,
    "bias": 0.45,
    "sinks": 0.25,
    "causal": 0.5,
    "window": 0.25,
    "query_lengths": 0.3,
    "key_lengths": 0.35,
    "prefix_lengths": 0.4,
    "segments": 0.22,
    "softcap": 0.25,
    "scale": 0.3,
    "dropout_p": 0.3,
    "return_lse": 0.5,
}
LENGTHS_AND_SEGMENTS = (
    "query_lengths",
    "key_lengths",
    "prefix_lengths",
    "query_segments",
    "key_segments",
)
BY_POSITION = ("causal", "window", "global_keys", *LENGTHS_AND_SEGMENTS)
LATER = ("sinks",)
PACKED = ("causal", "window", "bias", "sinks", "softcap", "scale", "dropout_p", "return_lse")


class _Drawer:
    def __init__(self, seed: int, case: int, only: frozenset[str] | None) -> None:
        self.rng = random.Random(f"attention/{seed}/{case}")
        # Newer keywords use a separate generator, so that old case numbers give the same problems.
        self.later = random.Random(f"attention/later/{seed}/{case}")
        self.only = only
        self.block_rng = random.Random(f"blocks/{seed}/{case}")
        self.page_rng = random.Random(f"pages/{seed}/{case}")
        self.eight_rng = random.Random(f"eight bits/{seed}/{case}")
        self.global_rng = random.Random(f"global keys/{seed}/{case}")
        self.generator = torch.Generator().manual_seed(self.rng.getrandbits(60))

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    # ---- sizes

    def shapes(self) -> None:
        r = self.rng
        self.B = r.choices((0, 1, 2, 3), (1, 50, 35, 14))[0]
        self.Hkv, self.G = r.choice((1, 1, 2, 3)), r.choices((1, 2, 3, 4), (60, 20, 8, 12))[0]
        self.Lq = 0 if self.chance(0.01) else r.choice(LENGTHS)
        self.Lk = 0 if self.chance(0.01) else self.Lq if self.chance(0.3) else r.choice(LENGTHS)
        if self.chance(0.1):
            self.Lq = 1
        while self.B * self.Hkv * self.G * self.Lq * self.Lk > BUDGET:
            if self.B > 1 and self.chance(0.5):
                self.B -= 1
            elif self.Hkv * self.G > 1:
                self.Hkv, self.G = (self.Hkv, self.G - 1) if self.G > 1 else (self.Hkv - 1, 1)
            elif self.B > 1:
                self.B -= 1
            else:
                self.Lq, self.Lk = (self.Lq + 1) // 2, self.Lk
        self.Hq = self.Hkv * self.G
        dims = ODD_HEAD_DIMS if self.chance(0.05) else HEAD_DIMS
        self.D = r.choices(dims, [300.0 / (30 + d) for d in dims])[0]
        self.Dv = r.choice(dims) if self.chance(0.2) else self.D

    # ---- values

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator)

    def values(self, *size: int, spread: float = 1.0) -> Tensor:
        """Return random float32 of the problem's kind of data."""
        x = self.normal(*size) * spread
        if self.data == "positive":
            return x.abs()
        if self.data == "offset":
            return x + 2.0 * spread * (1 if self.chance(0.5) else -1)
        if self.data == "heavy":
            return x * (1.2 * self.normal(*size)).exp().clamp(max=30.0)
        return x

    def integers(self, low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high + 1, size, generator=self.generator)

    def lengths(self, full: int) -> Tensor:
        x = self.integers(0, full, self.B)
        for b in range(self.B):
            if self.chance(0.5):
                x[b] = self.rng.choice((0, full, full, full, max(full - 1, 0), full // 2))
        return x if self.chance(0.5) else x.to(torch.int32)

    def segments(self, length: int) -> Tensor:
        ids = self.integers(-1, 2, self.B, length)
        return ids if self.chance(0.3) else ids.sort(1).values

    def dense(self, *, boolean: bool) -> Tensor:
        """Return a mask or bias of a shape that broadcasts to (B, Hq, Lq, Lk)."""
        full = (self.B, self.Hq, self.Lq, self.Lk)
        kind = self.rng.choice(("full", "queries", "heads", "key_padding", "random", "flat"))
        keep = {
            "full": (1, 1, 1, 1),
            "queries": (1, 0, 1, 1),
            "heads": (0, 1, 1, 1),
            "key_padding": (1, 0, 0, 1),
            "flat": (0, 0, 1, 1),
            "random": [self.chance(0.6) for _ in full],
        }[kind]
        shape = [n if k else 1 for n, k in zip(full, keep)]
        shape = shape[2:] if kind == "flat" else shape
        if boolean:
            x = torch.rand(shape, generator=self.generator) < self.rng.choice((0.95, 0.8, 0.4))
        else:
            x = self.normal(*shape) * self.rng.choice((0.5, 2.0))
        if self.chance(0.25) and shape[-1] > 1:  # an expanded view: stride 0
            axis = self.rng.randrange(len(shape))
            x = x.narrow(axis, 0, min(1, shape[axis])).expand(shape)
        return x

    def extremes(self, x: Tensor) -> Tensor:
        """Add -inf elements and rows and, in at most one term, finfo.min rows to a float mask."""
        lowest_too = self.only is None and "lowest" not in self.features
        kinds = ("none", "holes", "dead_rows") + ("lowest_rows", "mixed") * lowest_too
        x, kind = x.clone(), self.rng.choice(kinds)
        lowest = torch.finfo(x.dtype).min
        flat = x.flatten(0, -2)

        def pick(p: float) -> Tensor:
            return torch.rand(flat.shape[0], generator=self.generator) < p

        if kind in ("holes", "mixed"):
            flat[torch.rand(flat.shape, generator=self.generator) < 0.2] = -torch.inf
        if kind in ("dead_rows", "mixed"):
            flat[pick(0.2)] = -torch.inf
        if kind in ("lowest_rows", "mixed"):
            self.features.add("lowest")
            flat[pick(0.3)] = lowest
            flat[torch.rand(flat.shape, generator=self.generator) < 0.1] = lowest
        return flat.reshape(x.shape)

    def draw_sinks(self) -> bool:
        """Draw sinks, some of them -inf, in a random layout, with or without a gradient."""
        r, generator = self.later, torch.Generator().manual_seed(self.later.getrandbits(60))
        x = torch.randn(self.Hq, generator=generator) * r.choice((0.0, 1.0, 4.0, 30.0))
        x = x.masked_fill(torch.rand(self.Hq, generator=generator) < 0.15, -torch.inf)
        x = x.to(
            torch.float64
            if self.dtype == torch.float64
            else r.choice((self.dtype, torch.float32, torch.bfloat16))
        )
        self.layouts["sinks"] = random_layout(r, x)
        self.tensors["sinks"] = place(x, self.layouts["sinks"])
        return r.random() < 0.9

    # ---- keywords

    def draw_keywords(self) -> None:
        r = self.rng
        plain = self.chance(0.08)
        self.packed = self.chance(0.15) and self.only is None
        drawn = {
            k
            for k, p in CHANCES.items()
            if not plain and (self.later.random() if k in LATER else r.random()) < p
        }
        want = {k for k in drawn if not self.packed or k in PACKED}
        if self.only is not None:
            want &= self.only
        self.keywords: dict[str, Any] = {}
        if self.packed:
            self.keywords |= {
                "query_lengths": self.lengths(self.Lq),
                "key_lengths": self.lengths(self.Lk),
            }
            if self.B and self.chance(0.2):
                self.keywords["key_lengths"].fill_(self.Lk)
        if "prefix_lengths" in want:
            want.add("causal")
        if "causal" in want:
            self.keywords["causal"] = r.choice(("top_left", "bottom_right"))
        if "window" in want:
            sides = (None, 0, 1, 7, 16, 40, 64, self.Lk // 2, self.Lk)
            self.keywords["window"] = (r.choice(sides), r.choice(sides))
            # Without a window global_keys are refused.
            bounded = self.keywords["window"] != (None, None)
            if self.only is None and self.global_rng.random() < 0.5 and bounded:
                self.keywords["global_keys"] = self.global_rng.choice((1, 1, 4, 33, 70, self.Lk))
                want.add("global_keys")
        for name, full in (
            ("query_lengths", self.Lq),
            ("key_lengths", self.Lk),
            ("prefix_lengths", self.Lk),
        ):
            if name in want:
                self.keywords[name] = self.lengths(full)
        if "segments" in want:
            self.keywords["query_segments"] = self.segments(self.Lq)
            self.keywords["key_segments"] = (
                self.keywords["query_segments"]
                if self.Lq == self.Lk and self.chance(0.5)
                else self.segments(self.Lk)
            )
        if "softcap" in want:
            self.keywords["softcap"] = r.choice((0.5, 5.0, 20.0, 50.0))
        if "scale" in want:
            self.keywords["scale"] = r.choice((1.0, 1.0, 0.3, 0.05, -0.2, 0.0)) / (
                1 if self.D < 40 else 4
            )
        if "dropout_p" in want:
            self.keywords["dropout_p"] = r.choice((0.1, 0.1, 0.3, 0.5, 0.9, 1e-5, 1.0))
            self.keywords["dropout_seed"] = r.getrandbits(64) - 2**63
        if "return_lse" in want:
            self.keywords["return_lse"] = True
        self.features = set(want)
        if self.only is None and self.page_rng.random() < 0.3:
            self.features.add("pages")
        if (
            self.only is None
            and (not self.packed or "pages" in self.features)
            and self.dtype != torch.float64
            and self.eight_rng.random() < 0.25
        ):
            self.features.add("eight bits")

    def draw_terms(self, want: set[str]) -> None:
        """Draw masks and biases into `tensors` if floating, else into the keywords."""
        r = self.rng
        near = (
            [torch.float64]
            if self.dtype == torch.float64
            else [self.dtype, torch.float32, torch.bfloat16]
        )
        if "attn_mask" in want:
            boolean = self.chance(0.5)
            mask = self.dense(boolean=boolean)
            if boolean:
                layout = random_layout(r, mask)
                self.keywords["attn_mask"] = (
                    mask if 0 in mask.stride() else place(mask, layout, fill=True)
                )
                self.features.add("bool_mask")
                if self.only is None and self.block_rng.random() < 0.4:
                    self.features.add("blocks")
            else:
                self.tensors["attn_mask"] = self.extremes(mask.to(r.choice(near)))
                self.features.add("float_mask")
        if "bias" in want:
            kind = r.choice(("alibi", "t5")) if self.packed else r.choice(("dense", "alibi", "t5"))
            self.features.add(kind)
            if kind == "dense":
                bias = self.dense(boolean=False).to(r.choice(near))
                self.tensors["bias"] = self.extremes(bias) if self.chance(0.2) else bias
            elif kind == "alibi":
                self.tensors["slopes"] = (torch.rand(self.Hq, generator=self.generator) - 0.1).to(
                    r.choice(near)
                )
            else:
                bidirectional, buckets = self.chance(0.5), r.choice((4, 8, 32, 32))
                self.tensors["table"] = self.normal(buckets, self.Hq).to(r.choice(near))
                self.keywords["t5"] = (bidirectional, r.choice((20, 64, 128)))

    # ---- memory

    def spoil(self) -> None:
        """Put non-finite values where nothing may be read: past the lengths, at invisible pairs."""
        k = self.keywords

        def bad() -> float:
            return self.rng.choice((float("nan"), float("inf"), -float("inf")))

        for name, rows in (
            ("query_lengths", ("query", "grad_out", "grad_lse")),
            ("key_lengths", ("key", "value")),
        ):
            if name in k and self.chance(0.7):
                for tensor in rows:
                    x = self.tensors.get(tensor)
                    if x is not None and not (x.dim() == 4 and 0 in x.stride()):
                        past = torch.arange(x.shape[2]) >= k[name].long()[:, None]
                        x.masked_fill_(
                            past[:, None, :, None] if x.dim() == 4 else past[:, None, :], bad()
                        )
                self.features.add("spoiled")
        mask = k.get("attn_mask")
        if (
            mask is not None
            and mask.dim() == 4
            and mask.shape[2] == 1
            and mask.shape[1] == 1
            and self.chance(0.7)
        ):
            hidden = ~mask.expand(self.B, 1, 1, self.Lk)[:, 0, 0]
            for tensor in ("key", "value"):
                if 0 not in self.tensors[tensor].stride():
                    self.tensors[tensor].masked_fill_(hidden[:, None, :, None], bad())
            self.features.add("spoiled")
        names = [n for n in ("attn_mask", "bias") if n in self.tensors]
        if names and self.chance(0.6):
            by_position: dict[str, Any] = {n: k[n] for n in BY_POSITION if n in k}
            visible, _ = oracle.visible_pairs(
                oracle.Keywords(**by_position), self.B, self.Lq, self.Lk
            )
            visible = visible.expand(self.B, self.Hq, self.Lq, self.Lk)
            if mask is not None:
                visible = visible & mask
            for name in names:
                x = self.tensors[name]
                if 0 in x.stride() or visible.numel() == 0:
                    continue
                seen = (
                    visible.double()
                    .sum_to_size((1,) * (4 - x.dim()) + tuple(x.shape))
                    .reshape(x.shape)
                    > 0
                )
                x.masked_fill_(~seen, bad() if self.chance(0.5) else float("nan"))
            self.features.add("spoiled")

    def lay_out(self) -> None:
        """Move every tensor to its memory layout."""
        self.layouts = {}
        for name, x in self.tensors.items():
            if (
                name in ("query", "key", "value", "grad_out")
                and 0 not in x.shape
                and self.chance(0.08)
            ):
                axis = self.rng.choice([0, 1] if name != "grad_out" else [0, 1, 2, 3])
                self.tensors[name] = x.narrow(axis, 0, 1).expand(x.shape)
                self.layouts[name] = f"expanded{axis}"
            elif 0 in x.stride() and x.numel():
                self.layouts[name] = "expanded"
            else:
                self.layouts[name] = random_layout(self.rng, x)
                self.tensors[name] = place(x, self.layouts[name])

    def problem(self) -> Problem:
        r = self.rng
        self.shapes()
        self.dtype = r.choices(DTYPES, DTYPE_WEIGHTS)[0]
        self.data = r.choices(tuple(DATA), tuple(DATA.values()))[0]
        self.draw_keywords()
        spread = r.choice((0.3, 1.0, 1.0, 2.0)) if self.data != "large_logits" else 12.0
        self.tensors = {
            "query": self.values(self.B, self.Hq, self.Lq, self.D, spread=spread),
            "key": self.values(self.B, self.Hkv, self.Lk, self.D, spread=spread),
            "value": self.values(self.B, self.Hkv, self.Lk, self.Dv),
            "grad_out": self.values(self.B, self.Hq, self.Lq, self.Dv),
        }
        self.tensors = {n: x.to(self.dtype) for n, x in self.tensors.items()}
        has_lse = "return_lse" in self.features and self.chance(0.7)
        if has_lse:
            self.tensors["grad_lse"] = self.values(self.B, self.Hq, self.Lq).to(
                torch.float64 if self.dtype == torch.float64 else torch.float32
            )
        self.draw_terms(set(self.features))
        expanded = {n for n, x in self.tensors.items() if x.numel() and 0 in x.stride()}
        self.lay_out()
        if self.only is None:
            self.spoil()
        grad_out, grad_lse = self.tensors.pop("grad_out"), self.tensors.pop("grad_lse", None)
        wanted = tuple(self.tensors)
        if self.chance(0.2):
            wanted = tuple(n for n in wanted if self.chance(0.5))
        if "sinks" in self.features and self.draw_sinks():
            wanted = (*wanted, "sinks")
        self.features |= {"gqa"} if self.G > 1 else set()
        self.features |= {"value_dim"} if self.Dv != self.D else set()
        self.features |= {"varlen"} if self.packed else set()
        self.features |= (
            {"strided"} if set(self.layouts.values()) - {"contiguous"} or expanded else set()
        )
        return Problem(
            self.tensors,
            self.keywords,
            wanted,
            grad_out,
            grad_lse,
            self.dtype,
            self.data,
            self.packed,
            frozenset(self.features),
            self.layouts,
            self.block_rng.choice(BLOCK_SIZES) if "blocks" in self.features else None,
            (self.page_rng.choice(PAGE_SIZES), self.page_rng.getrandbits(30))
            if "pages" in self.features
            else None,
            self.eight_rng.choice((torch.float8_e4m3fn, torch.int8))
            if "eight bits" in self.features
            else None,
        )


def draw(seed: int, case: int, only: frozenset[str] | None = None) -> Problem:
    """Return problem `case` of run `seed`.

    `only` restricts the keywords, for implementations with fewer features, and excludes values that
    only our specification covers (NaN in hidden rows, rows of finfo.min).
    """
    return _Drawer(seed, case, only).problem()
