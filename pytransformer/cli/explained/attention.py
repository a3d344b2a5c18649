# SPDX-License-Identifier: Apache-2.0
"""The calls of attention and attention_varlen for `pytransformer explain`."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from pytransformer.cli import UsageError
from pytransformer.cli.explained import Arguments, Tensor, check_length, dropout

SHAPES = {
    "attention": "B,H,L,D or B,H,Lq,Lk,D",
    "attention_varlen": "B,H,L,D or B,H,Lq,Lk,D (B sequences of that length)",
}


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-heads",
        type=int,
        default=None,
        metavar="N",
        help="heads of key and value (grouped queries)",
    )
    group.add_argument(
        "--value-dim", type=int, default=None, metavar="N", help="last dimension of value, if not D"
    )
    group.add_argument("--causal", choices=("top_left", "bottom_right"), default=None)
    group.add_argument(
        "--window",
        type=_window,
        default=None,
        metavar="LEFT,RIGHT",
        help="a side left empty is unbounded: 128,",
    )
    group.add_argument(
        "--global-keys",
        type=int,
        default=0,
        metavar="N",
        help="the first keys, which every window has",
    )
    group.add_argument(
        "--mask",
        choices=("bool", "float", "padding"),
        default=None,
        help="attn_mask: dense, or (B, 1, 1, Lk)",
    )
    group.add_argument("--bias", choices=("dense", "alibi", "t5"), default=None)
    group.add_argument("--lengths", action="store_true", help="with query_lengths and key_lengths")
    group.add_argument(
        "--segments", action="store_true", help="with query_segments and key_segments"
    )
    group.add_argument("--prefix", action="store_true", help="with prefix_lengths")
    group.add_argument("--softcap", type=float, default=None)


def call(arguments: argparse.Namespace, tensor: Tensor) -> Arguments:
    import pytransformer as pt

    check_length(arguments, 4, 5)
    batch, heads, lq, *_, d = arguments.shape
    lk = arguments.shape[-2]
    kv_heads, dv = arguments.kv_heads or heads, arguments.value_dim or d
    device = arguments.device

    def full(length: int) -> torch.Tensor:
        return torch.full((batch,), length, dtype=torch.int64, device=device)

    kwargs: dict[str, Any] = {
        "causal": arguments.causal,
        "window": arguments.window,
        "global_keys": arguments.global_keys,
        "softcap": arguments.softcap,
        **dropout(arguments),
    }
    match arguments.bias:
        case "alibi":
            kwargs["bias"] = pt.AlibiBias(tensor(heads, of=torch.float32))
        case "t5":
            kwargs["bias"] = pt.RelativePositionBias(tensor(32, heads, of=torch.float32))
        case "dense":
            kwargs["bias"] = tensor(1, heads, lq, lk)
    packed = arguments.op == "attention_varlen"
    if packed:
        refused = [
            f"--{name}"
            for name in ("mask", "lengths", "segments", "prefix")
            if getattr(arguments, name)
        ]
        if refused or arguments.bias == "dense":
            raise UsageError(
                f"attention_varlen takes no {', '.join(refused) or 'dense bias'}: use --causal,"
                " --window, --bias alibi or t5"
            )
        starts = [torch.arange(batch + 1, device=device) * length for length in (lq, lk)]
        return (
            tensor(batch * lq, heads, d), tensor(batch * lk, kv_heads, d),
            tensor(batch * lk, kv_heads, dv),
            *starts, lq, lk,
        ), kwargs  # fmt: skip
    match arguments.mask:
        case "bool":
            kwargs["attn_mask"] = tensor(batch, 1, lq, lk, of=torch.bool)
        case "float":
            kwargs["attn_mask"] = tensor(batch, 1, lq, lk)
        case "padding":
            kwargs["attn_mask"] = tensor(batch, 1, 1, lk, of=torch.bool)
    if arguments.lengths:
        kwargs |= {"query_lengths": full(lq), "key_lengths": full(lk)}
    if arguments.prefix:
        kwargs["prefix_lengths"] = full(min(1, lk))
    if arguments.segments:
        kwargs |= {
            f"{side}_segments": torch.zeros(batch, n, dtype=torch.int64, device=device)
            for side, n in (("query", lq), ("key", lk))
        }
    return (
        tensor(batch, heads, lq, d),
        tensor(batch, kv_heads, lk, d),
        tensor(batch, kv_heads, lk, dv),
    ), kwargs


def _window(text: str) -> tuple[int | None, int | None]:
    sides = text.split(",")
    if len(sides) != 2 or not all(side.strip() == "" or side.strip().isdecimal() for side in sides):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not LEFT,RIGHT with each a number or empty, as 128,0 or 128,"
        )
    left, right = (int(side) if side.strip() else None for side in sides)
    return left, right
