# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of attention and attention_varlen.

bench/conftest.py runs the cases, tune.py the tuning problems, overhead.py the tiny calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer.kernels.attention import configs
from pytransformer.ops.attention import attention_op
from pytransformer.ops.masks import buckets_of


def test_speed(timed) -> None:
    timed()


def tune(tools: ModuleType) -> Iterator[Any]:
    """Yield the problem classes for bench/tools/tune.py."""
    for dtype in (torch.bfloat16, torch.float32):
        size = dtype.itemsize
        for head_dim in configs.HEAD_DIMS:
            for kernel in (
                "forward",
                "decode",
                "dkdv",
                "grouped dkdv",
                "dropout dkdv",
                "dq",
                "dbias",
            ):
                for score_mods in (
                    (1,)
                    if kernel in ("dbias", "dropout dkdv")
                    else (0,)
                    if kernel in ("decode", "grouped dkdv") or size == 4
                    else (0, 1)
                ):
                    yield tools.Task(
                        "attention",
                        configs.key_of(kernel, head_dim, size, score_mods),
                        "attention_forward"
                        if kernel in ("forward", "decode")
                        else f"attention_backward_{kernel.split()[-1]}",
                        tools.nearest_first(
                            configs.candidates(kernel, head_dim, size, score_mods=score_mods)
                        ),
                        _attention(tools, kernel, head_dim, dtype, score_mods),
                    )


def _attention(
    tools: ModuleType, kernel: str, head_dim: int, dtype: torch.dtype, score_mods: int
) -> Callable[..., Any]:
    def prepare(device: str, small: bool, backend: str) -> Any:
        length = 64 if small else 2048 if kernel == "dbias" or dtype == torch.float32 else 4096
        queries, keys = (1, 128 if small else 32768) if kernel == "decode" else (length, length)
        make = tools.random_values(device, dtype)
        kwargs: dict[str, Any] = {}
        if kernel == "dbias":
            kwargs["bias"] = make(1, 8, length, length)
        elif kernel == "dkdv" and score_mods:
            kwargs["bias"] = pt.AlibiBias(torch.linspace(0.1, 0.8, 8, device=device))
        elif score_mods:
            kwargs |= {"dropout_p": 0.1, "dropout_seed": 3}
        heads = 2 if kernel in ("decode", "grouped dkdv") else 8
        a, _, _ = attention_op.prepare(
            make(1, 8, queries, head_dim),
            make(1, heads, keys, head_dim),
            make(1, heads, keys, head_dim),
            **kwargs,
        )
        names = {"dkdv": ("key", "value"), "dq": ("query",), "dbias": ("bias",)}.get(
            kernel.split()[-1], ()
        )
        return tools.direction(attention_op, a, names, backend)

    return prepare


def overhead(made: Callable[..., Any]) -> dict[str, Any]:
    """Return tiny problems beside PyTorch's function, by name."""

    def problem(*more: torch.Tensor, kv_heads: int = 2, **options: float) -> Any:
        """Return a (1, 2, 8, 16) problem; `more` is a mask or a bias with a gradient."""
        q, k, v = (
            torch.randn(1, 2, 8, 16),
            torch.randn(1, kv_heads, 8, 16),
            torch.randn(1, kv_heads, 8, 16),
        )
        theirs = partial(
            F.scaled_dot_product_attention,
            **options,
            **({"enable_gqa": True} if kv_heads == 1 else {}),
        )
        ours = lambda q, k, v, mask=None: pt.attention(q, k, v, attn_mask=mask, **options)
        return made([q, k, v, *more], ours, theirs, drop_in=True)

    return {
        "attention": problem(),
        "attention, bool mask": problem(torch.rand(1, 1, 8, 8) > 0.3),
        "attention, bias": problem(torch.randn(1, 2, 8, 8)),
        "attention, GQA": problem(kv_heads=1),
        "attention, dropout": problem(dropout_p=0.1),
        "ALiBi": _alibi(made),
        "T5 bias": _t5(made),
        "attention_varlen": _varlen(made),
        "pt.scaled_dot_product": problem()._replace(
            ours=pt.scaled_dot_product_attention, drop_in=False
        ),
        "decode, lengths": _decode(made),
        "decode, pages": _decode(made, page_size=4),
        "varlen, pages": _varlen_pages(made),
    }


def _alibi(made: Callable[..., Any]) -> Any:
    """Compare ALiBi with a dense bias in PyTorch.

    The dense bias gets no gradient here; an extra product computes that of the slopes.
    """
    q, k, v, slopes = *torch.randn(3, 1, 2, 8, 16).unbind(), torch.rand(2)
    distance = -(torch.arange(8)[:, None] - torch.arange(8)).abs().float()
    return made(
        [q, k, v, slopes],
        lambda q, k, v, slopes: pt.attention(q, k, v, bias=pt.AlibiBias(slopes)),
        lambda q, k, v, slopes: F.scaled_dot_product_attention(
            q, k, v, slopes[:, None, None] * distance
        ),
    )


def _t5(made: Callable[..., Any]) -> Any:
    q, k, v, table = *torch.randn(3, 1, 2, 8, 16).unbind(), torch.randn(8, 2)
    buckets = buckets_of(torch.arange(8) - torch.arange(8)[:, None], 8, True, 32)
    return made(
        [q, k, v, table],
        lambda q, k, v, table: pt.attention(q, k, v, bias=pt.RelativePositionBias(table, True, 32)),
        lambda q, k, v, table: F.scaled_dot_product_attention(
            q, k, v, F.embedding(buckets, table).permute(2, 0, 1)[None]
        ),
    )


def _varlen(made: Callable[..., Any]) -> Any:
    """Compare two sequences of 8 and 5 rows with padded ones and a mask in PyTorch.

    PyTorch's nested tensors take several times as long.
    """
    q, k, v = torch.randn(3, 13, 2, 16).unbind()
    offsets = torch.tensor([0, 8, 13], dtype=torch.int32)
    padded, mask = (
        torch.randn(2, 2, 8, 16),
        (torch.arange(8) < torch.tensor([[8], [5]]))[:, None, None],
    )
    ours = lambda q, k, v: pt.attention_varlen(q, k, v, offsets, offsets, 8, 8)
    theirs = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)
    return made([q, k, v], ours, theirs, [padded, padded.clone(), padded.clone()])


def _varlen_pages(made: Callable[..., Any]) -> Any:
    """Compare a chunk of 5 tokens and one new token over pages with padded rows in PyTorch.

    PyTorch gathers the pages and gets a mask for the lengths.
    """
    lengths, queries = torch.tensor([16, 9]), torch.randn(6, 2, 16)
    pages, table = torch.randn(2, 8, 2, 4, 16).unbind(), torch.randperm(8).view(2, 4).int()
    offsets = torch.tensor([0, 5, 6], dtype=torch.int32)
    mask = (torch.arange(16) < lengths[:, None])[:, None, None]
    options: dict[str, Any] = {
        "page_table": table,
        "key_lengths": lengths,
        "causal": "bottom_right",
    }
    gathered = lambda pool: pool[table].transpose(1, 2).flatten(2, 3)
    ours = lambda q, k, v: pt.attention_varlen(q, k, v, offsets, None, 5, None, **options)
    theirs = lambda q, k, v: F.scaled_dot_product_attention(q, gathered(k), gathered(v), mask)
    return made([queries, *pages], ours, theirs, [torch.randn(2, 2, 5, 16), *pages],
        forward_only=True)  # fmt: skip


def _decode(made: Callable[..., Any], page_size: int | None = None) -> Any:
    """Compare one token of two sequences with 16 and 9 keys.

    PyTorch gets a mask for the lengths, and gathers the pages.
    """
    lengths, queries, pool = (
        torch.tensor([16, 9]),
        torch.randn(2, 2, 1, 16),
        torch.randn(2, 2, 2, 16, 16),
    )
    mask = (torch.arange(16) < lengths[:, None])[:, None, None]
    options = {"causal": "bottom_right", "key_lengths": lengths}
    theirs = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)
    if page_size is None:
        ours = lambda q, k, v: pt.attention(q, k, v, **options)
        return made([queries, *pool], ours, theirs, forward_only=True)
    table = (
        torch.randperm(32 // page_size, generator=torch.Generator().manual_seed(1))
        .view(2, -1)
        .int()
    )
    pages = [t.reshape(-1, 2, page_size, 16) for t in pool]
    gathered = lambda pool: pool[table].transpose(1, 2).flatten(2, 3)
    return made(
        [queries, *pages],
        lambda q, k, v: pt.attention(q, k, v, page_table=table, **options),
        lambda q, k, v: theirs(q, gathered(k), gathered(v)),
        forward_only=True,
    )
