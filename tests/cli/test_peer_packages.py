# SPDX-License-Identifier: Apache-2.0
"""Peers from packages that run on GPUs only, with their functions replaced by plain PyTorch.

The replacements have the packages' signatures, so a wrong argument gives a wrong result here.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytransformer.cli.benchmark import check, exact, plan
from pytransformer.cli.benchmark.runner import work
from pytransformer.cli.providers import Problem, Unsupported, providers

pytestmark = [pytest.mark.unpoisoned, pytest.mark.usefixtures("one_thread")]


def flash_attn_func(q, k, v, qv=None, softmax_scale=None, causal=False,
                    window_size=(None, None), learnable_sink=None, softcap=0.0,
                    deterministic=False):  # fmt: skip
    """flash_attn.cute 4.0: rows are (batch, length, heads, columns), causality ends at the last.

    Arguments that no peer passes are left out.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    lengths = q.shape[2], k.shape[2]
    hidden = torch.zeros(lengths, dtype=torch.bool)
    offset = lengths[1] - lengths[0]
    distance = torch.arange(lengths[1]) - torch.arange(lengths[0])[:, None] - offset
    left, right = window_size
    hidden |= distance > 0 if causal else hidden
    hidden |= distance < -left if left is not None else hidden
    hidden |= distance > right if right is not None else hidden
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-2, -1) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return out.transpose(1, 2), torch.logsumexp(scores, -1)


def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    """quack 0.6: two-dimensional rows, weights in float32."""
    assert x.dim() == 2 and weight.dtype == torch.float32
    assert bias is None or bias.dtype == torch.float32
    mean, variance = x.float().mean(-1), x.float().var(-1, unbiased=False)
    y = F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)
    return (y, (variance + eps).rsqrt(), mean) if return_rstd and return_mean else y


def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
    z, d = (x.float() - mean[:, None]) * rstd[:, None], dout.float()
    w = d * weight
    d_x = (w - w.mean(-1, keepdim=True) - z * (w * z).mean(-1, keepdim=True)) * rstd[:, None]
    return d_x.to(x.dtype), (d * z).sum(0), d.sum(0) if has_bias else None


def liger_fused_linear_cross_entropy(input, weight, target, bias=None, ce_weight=None,
                                     ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
                                     reduction="mean", softcap=None):  # fmt: skip
    """liger-kernel 0.8."""
    z = F.linear(input, weight, bias).float()
    z = softcap * torch.tanh(z / softcap) if softcap is not None else z
    loss = F.cross_entropy(z, target, ce_weight, ignore_index=ignore_index,
                           label_smoothing=label_smoothing, reduction=reduction)  # fmt: skip
    if lse_square_scale:
        valid = target != ignore_index
        loss = loss + lse_square_scale * (torch.logsumexp(z, -1) ** 2)[valid].mean()
    return loss


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {
        "flash_attn": (),
        "flash_attn.cute": (flash_attn_func,),
        "quack": (),
        "quack.rmsnorm": (layernorm_fwd, layernorm_bwd),
        "liger_kernel": (),
        "liger_kernel.transformers": (),
        "liger_kernel.transformers.functional": (liger_fused_linear_cross_entropy,),
    }
    for name, members in functions.items():
        module = ModuleType(name)
        for function in members:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)


def prepared(case: str, peer: str, dtype: str) -> tuple[Problem, Any]:
    problem = Problem.make(plan.case(case, "small"), plan.DTYPES[dtype], "cpu", seed=20, grad=True)
    provider = next(p for p in providers(problem.case.op) if p.name == peer)
    return problem, provider.prepare(dataclasses.replace(problem, device="cuda"))


@pytest.mark.parametrize(
    ("peer", "case"),
    [
        *(("flash_attn_4", c) for c in ("full", "causal", "window", "softcap", "gqa")),
        ("flash_attn_4_in_order", "full"),
        ("quack", "layer_norm"),
        ("liger", "linear_cross_entropy"),
        ("liger", "linear_cross_entropy_softcap"),
    ],
)
def test_peer_packages_compute_the_problem(peer: str, case: str, packages: None) -> None:
    """Outputs and gradients are within the bound of peers."""
    problem, peer_run = prepared(case, peer, "bfloat16")
    grads = check.upstream(problem, 20)
    found = check.compute(problem, peer_run, grads)
    solved = exact.solve(problem, grads, exact.rows_of(problem))
    assert check.judge(problem, found, solved, peer=True).wrong is None
    work(problem, peer_run, "fwd")()


@pytest.mark.parametrize(
    ("peer", "case", "reason"),
    [
        ("flash_attn_4", "alibi", "has no bias"),
        ("flash_attn_4", "dropout", "has no dropout"),
        ("flash_attn_4", "varlen", "padded"),
        ("quack", "add_norm", "rms_norm and layer_norm only"),
    ],
)
def test_peer_packages_refuse_other_problems(
    peer: str, case: str, reason: str, packages: None
) -> None:
    with pytest.raises(Unsupported, match=reason):
        prepared(case, peer, "bfloat16")


@pytest.mark.parametrize(
    ("peer", "case"),
    [("flash_attn_4", "full"), ("quack", "layer_norm"), ("liger", "linear_cross_entropy")],
)
def test_absent_packages_are_named(peer: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "quack", "liger_kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unsupported, match="is not installed here"):
        prepared(case, peer, "bfloat16")
