# SPDX-License-Identifier: Apache-2.0
"""integrations.torch: PyTorch's flash attention registry activates our kernels and restores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pytransformer as pt
import pytransformer.compat.flash_attn as flash_attn
from pytransformer import drop_in

registry: Any = torch.nn.attention
pytestmark = pytest.mark.skipif(
    not hasattr(registry, "register_flash_attention_impl"),
    reason="this torch has no registry of flash attention",
)
OPS = (
    "_flash_attention_forward",
    "_flash_attention_backward",
    "_flash_attention_forward_no_dropout_inplace",
)


@pytest.fixture
def registered() -> Iterator[None]:
    """Register; deactivate and remove the name after the test."""
    from torch.nn.attention import _registry

    before = dict(_registry._FLASH_ATTENTION_IMPLS)
    pt.integrations.torch.register()
    yield
    registry.restore_flash_attention_impl(_raise_warn=False)
    _registry._FLASH_ATTENTION_IMPLS.clear()
    _registry._FLASH_ATTENTION_IMPLS.update(before)


def cpu_kernels() -> list[bool]:
    return [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "CPU") for op in OPS]


def backend_of_a_masked_call() -> str:
    """Return the raw op that PyTorch's masked attention runs, or ""."""
    from pytransformer.ops._core.registry import trace

    q = torch.randn(1, 2, 5, 8)
    with trace() as record:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.rand(5, 5) > 0.3)
    return next((op for op, _ in record), "")


def test_activation_by_the_registry_runs_our_kernels_and_restores_exactly(registered: None) -> None:
    assert "pytransformer" in registry.list_flash_attention_impls()
    before = cpu_kernels()
    assert not any(before) and backend_of_a_masked_call() == ""
    for _ in range(2):  # also again after a restore
        registry.activate_flash_attention_impl("pytransformer")
        assert registry.current_flash_attention_impl() == "pytransformer"
        assert drop_in.is_active() and all(cpu_kernels())
        assert backend_of_a_masked_call().startswith("attention")
        registry.restore_flash_attention_impl()
        assert registry.current_flash_attention_impl() is None
        assert (
            not drop_in.is_active() and cpu_kernels() == before and backend_of_a_masked_call() == ""
        )


def test_restoring_leaves_other_activations(registered: None) -> None:
    with pt.activate():
        registry.activate_flash_attention_impl("pytransformer")
        registry.restore_flash_attention_impl()
        assert drop_in.is_active() and not any(cpu_kernels())
    registry.activate_flash_attention_impl("pytransformer")
    with pt.activate():
        pass
    assert drop_in.is_active()
    # ends every activation of attention; the registry's handle still restores the rest
    pt.deactivate()
    registry.restore_flash_attention_impl()
    assert not drop_in.is_active() and not any(cpu_kernels())


def test_register_names_the_missing_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(registry, "register_flash_attention_impl")
    with pytest.raises(
        ImportError, match=r"^register: torch must have .*; call pytransformer.activate"
    ):
        pt.integrations.torch.register()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1), (-1, 2)])
def test_varlen_attn_equals_the_packed_function_on_cpu(
    window: tuple[int, int], registered: None
) -> None:
    """Compare bits and gradients; test_compat_flash_attn compares that function with a formula."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

    registry.activate_flash_attention_impl("pytransformer")
    q, k, v = (torch.randn(n, h, 16, requires_grad=True) for n, h in ((9, 4), (12, 2), (12, 2)))
    ends = (
        torch.tensor([0, 3, 9], dtype=torch.int32),
        torch.tensor([0, 7, 12], dtype=torch.int32),
        6,
        7,
    )
    for scale in (None, 0.4):
        options = {"window_size": window, "scale": scale, "enable_gqa": True}
        out, lse = varlen_attn(q, k, v, *ends, **options, return_aux=AuxRequest(lse=True))
        expected, expected_lse, _ = flash_attn.flash_attn_varlen_func(
            q, k, v, *ends, softmax_scale=scale, window_size=window, return_attn_probs=True
        )
        grad = torch.randn_like(out)
        grads = [torch.autograd.grad(t, (q, k, v), grad) for t in (out, expected)]
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        assert all(torch.equal(a, b) for a, b in zip(*grads))
        with torch.no_grad():
            into = torch.empty_like(out)
            varlen_attn_out(into, q, k, v, *ends, **options)
        assert torch.equal(into, expected)


@torch.no_grad()
def test_varlen_attn_reads_pages_and_lengths_on_cpu(registered: None) -> None:
    from torch.nn.attention.varlen import varlen_attn

    registry.activate_flash_attention_impl("pytransformer")
    q, pools = torch.randn(5, 2, 8), [torch.randn(6, 4, 2, 8) for _ in range(2)]
    cu_q, used = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    table = torch.tensor([[5, 1], [0, 3]], dtype=torch.int32)
    keys = [
        torch.cat([pool[row.long()].flatten(0, 1)[:n] for row, n in zip(table, used.tolist())])
        for pool in pools
    ]
    ends = cu_q, torch.tensor([0, 5, 13], dtype=torch.int32), 3, 8
    for window, num_splits in itertools.product(((-1, -1), (-1, 0), (2, 1)), (None, 1)):
        expected = varlen_attn(q, *keys, *ends, window_size=window)
        paged = varlen_attn(
            q,
            *pools,
            cu_q,
            None,
            3,
            8,
            window_size=window,
            seqused_k=used,
            block_table=table,
            num_splits=num_splits,
        )
        assert torch.equal(paged, expected)
    more = [
        torch.cat((t[:5], torch.full((2, 2, 8), torch.nan), t[5:])) for t in keys
    ]  # rows behind the used ones
    ends = cu_q, torch.tensor([0, 7, 15], dtype=torch.int32), 3, 8
    assert torch.equal(
        varlen_attn(q, *more, *ends, seqused_k=used),
        varlen_attn(q, *keys, cu_q, torch.tensor([0, 5, 13]), 3, 8),
    )
    with pytest.raises(ValueError, match="num_splits must be"):
        varlen_attn(q, *keys, cu_q, torch.tensor([0, 5, 13]), 3, 8, num_splits=4)
