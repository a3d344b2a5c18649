# SPDX-License-Identifier: Apache-2.0
"""activate(): PyTorch's scaled_dot_product_attention and the modules on it use our kernels."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import pytransformer as pt
from pytransformer import drop_in
from pytransformer.ops._core.registry import trace
from support.hugging_face import model_distance_limit
from support.models import assert_same_elements

LIMIT = model_distance_limit(torch.float32)


def tensors(
    *shape: int, heads: int = 4, keys: int = 9
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(*shape, 4, 7, 8, generator=generator)
    return query, *(torch.randn(*shape, heads, keys, 8, generator=generator) for _ in range(2))


def masks() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    some = torch.rand(2, 4, 7, 9, generator=generator) < 0.6
    hidden_row = some.clone()
    hidden_row[1, :, 3] = False
    return {
        "bool": some,
        "bool, a row sees nothing": hidden_row,
        "key padding": (
            torch.arange(9)[None, None, None] < torch.tensor([9, 4])[:, None, None, None]
        ),
        "two-dimensional": some[0, 0],
        "additive": torch.randn(2, 1, 7, 9, generator=generator),
        "additive, -inf": torch.zeros(2, 4, 7, 9).masked_fill(~some, -torch.inf),
    }


CALLS: dict[str, Callable[[], Any]] = {
    "plain": lambda: sdpa(*tensors(2)),
    "three dimensions": lambda: sdpa(*tensors()),
    "two dimensions": lambda: sdpa(*(t[0] for t in tensors())),
    "five dimensions": lambda: sdpa(*tensors(3, 2)),
    "batch broadcasts": lambda: sdpa(tensors(2)[0], *(t[:1] for t in tensors(2)[1:])),
    "grouped heads": lambda: sdpa(*tensors(2, heads=2), enable_gqa=True),
    "grouped heads, three dimensions": lambda: sdpa(*tensors(heads=2), enable_gqa=True),
    "causal": lambda: sdpa(*tensors(2), is_causal=True),
    "causal, scale": lambda: sdpa(*tensors(2, keys=7), is_causal=True, scale=0.3),
    "no keys": lambda: sdpa(*tensors(2, keys=0)),
    "no batch": lambda: sdpa(*tensors(0)),
    "vmap": lambda: torch.vmap(sdpa, in_dims=(1, None, 0), out_dims=1)(
        tensors(2, 3)[0], tensors(2)[1], tensors(3, 2)[2]),
    "func.grad": lambda: torch.func.grad(lambda q, k, v: sdpa(q, k, v).square().sum())(*tensors(2)),
    "vmap of grad": lambda: torch.vmap(torch.func.grad(lambda q, k,
        v: sdpa(q, k, v).square().sum()))(*tensors(2)),
    "jit.trace": lambda: torch.jit.trace(sdpa, tensors(2))(*tensors(2)),
    **{name: lambda mask=mask: sdpa(*tensors(2), attn_mask=mask) for name, mask in masks().items()},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_results_equal_pytorch(backend: str, name: str) -> None:
    want = CALLS[name]()
    with pt.activate(), trace() as ran:
        got = CALLS[name]()
    assert ran
    assert {b for _, b in ran} == {backend}
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert_same_elements(got, want)


@pytest.mark.parametrize("name", masks())
def test_gradients_with_masks_equal_pytorch(backend: str, name: str) -> None:
    inputs = [*tensors(2), masks()[name]]
    weights = torch.randn(2, 4, 7, 8, generator=torch.Generator().manual_seed(6))

    def gradients() -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
        out = sdpa(*leaves[:3], attn_mask=leaves[3])
        return list(
            torch.autograd.grad((out * weights).sum(), [t for t in leaves if t.requires_grad])
        )

    want = gradients()
    with pt.activate(), trace() as ran:
        got = gradients()
    assert ran == [("attention_fwd", backend), ("attention_bwd", backend)]
    for mine, theirs in zip(got, want, strict=True):
        assert_same_elements(mine, theirs, gradient=True)


def test_mask_and_causal_intersect(backend: str) -> None:
    q, k, v = tensors(2, keys=7)
    mask = masks()["bool"][..., :7] | torch.eye(7, dtype=torch.bool)
    want = sdpa(q, k, v, attn_mask=mask & torch.ones(7, 7, dtype=torch.bool).tril())
    with pt.activate():
        assert_same_elements(sdpa(q, k, v, attn_mask=mask, is_causal=True), want)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_equals_pytorch(backend: str, context: Any) -> None:
    with pt.activate(), trace() as ran, context():
        sdpa(*tensors(2))
    assert ran == [("attention_fwd", backend)]


def test_autocast_equals_pytorch(backend: str) -> None:
    with pt.activate(), trace() as ran, torch.autocast("cpu", torch.bfloat16):
        out = sdpa(*tensors(2))
    assert out.dtype == torch.bfloat16
    assert ran == [("attention_fwd", backend)]


def test_meta_and_fake_tensors_have_the_shapes_of_pytorch() -> None:
    from torch._subclasses import FakeTensorMode

    with pt.activate():
        assert sdpa(*(t.to("meta") for t in tensors(2))).shape == (2, 4, 7, 8)
        with FakeTensorMode(), pt.use_backend(attention="reference"):
            assert sdpa(
                torch.randn(2, 4, 7, 8), *(torch.randn(2, 4, 9, 8) for _ in "kv")
            ).shape == (2, 4, 7, 8)


@pytest.mark.unpoisoned
def test_compiled_code_runs_our_op(backend: str) -> None:
    inputs = [t.requires_grad_() for t in tensors(2)]
    want = torch.autograd.grad(sdpa(*inputs, is_causal=True).square().sum(), inputs)
    torch._dynamo.reset()
    with pt.activate(), trace() as ran:
        compiled = torch.compile(
            lambda q, k, v: sdpa(q, k, v, is_causal=True), backend="aot_eager", fullgraph=True
        )
        got = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
        assert ran == [("attention_fwd", backend), ("attention_bwd", backend)]
        with torch.no_grad():
            compiled(*inputs)
        assert ran[2:] == [("attention_fwd", backend)]
    for mine, theirs in zip(got, want, strict=True):
        assert_same_elements(mine, theirs, gradient=True)


def test_dropout_follows_the_seed(backend: str) -> None:
    q, k, _ = tensors(2)
    eye = torch.eye(9)[None, None].expand(2, 4, 9, 9)  # the identity as value returns the weights
    with pt.activate():
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(sdpa(q, k, eye, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    kept = outs[0] != 0
    assert 0.35 < kept.float().mean() < 0.65
    assert_same_elements(outs[0][kept], 2 * sdpa(q, k, eye)[kept])


# ---- modules of torch.nn


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("which", ["plain", "padding", "causal", "padding and causal", "additive"])
def test_multihead_attention_equals_pytorch(
    backend: str, training: bool, need_weights: bool, which: str
) -> None:
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True).train(training)
    x = torch.randn(2, 6, 16)
    padding = torch.arange(6)[None] >= torch.tensor([6, 4])[:, None]
    arguments: dict[str, Any] = dict(need_weights=need_weights)
    if "padding" in which:
        arguments["key_padding_mask"] = padding
    if "causal" in which:
        arguments["attn_mask"] = torch.ones(6, 6, dtype=torch.bool).triu(1)
    if which == "additive":
        arguments["attn_mask"] = torch.randn(6, 6)

    def run() -> list[torch.Tensor]:
        module.zero_grad()
        with torch.set_grad_enabled(training):
            out = module(x, x, x, **arguments)[0]
        if training:
            out.square().sum().backward()
        return [out.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]

    want = run()
    with pt.activate(), trace() as ran:
        got = run()
    # need_weights=True requires the weights, which PyTorch computes with bmm and without an
    # attention op.
    assert len(ran) == (0 if need_weights else 1 + training)
    assert {b for _, b in ran} <= {backend}
    for mine, theirs in zip(got, want, strict=True):
        assert_same_elements(mine, theirs, gradient=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_equals_pytorch(backend: str, training: bool, norm_first: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # about nested tensors, which need norm_first=False
        model = torch.nn.Transformer(
            16, 4, 2, 2, 32, dropout=0.0, norm_first=norm_first, batch_first=True
        ).train(training)
    source, target, weights = torch.randn(2, 7, 16), torch.randn(2, 5, 16), torch.randn(9, 16)
    source_padding = torch.arange(7)[None] >= torch.tensor([7, 3])[:, None]
    target_padding = torch.arange(5)[None] >= torch.tensor([4, 5])[:, None]

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.set_grad_enabled(training):
            out = model(
                source, target, tgt_mask=torch.ones(5, 5, dtype=torch.bool).triu(1),
                src_key_padding_mask=source_padding,
                tgt_key_padding_mask=target_padding, memory_key_padding_mask=source_padding,
                tgt_is_causal=True,
            )[~target_padding]  # fmt: skip
        if training:
            (out * weights).sum().backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    want = run()
    with pt.activate(), trace() as ran:
        got = run()
    assert ran == [("attention_fwd", backend)] * 6 + [("attention_bwd", backend)] * 6 * training
    for mine, theirs in zip(got, want, strict=True):
        assert ((mine - theirs).norm() / theirs.norm().clamp_min(1.0)).item() < LIMIT


# ---- unsupported calls use PyTorch's kernel and are recorded


class Subclass(torch.Tensor):
    pass


FALLING_BACK: dict[str, tuple[Callable[[], Any], str]] = {
    "subclass": (
        lambda: sdpa(tensors(2)[0].as_subclass(Subclass), *tensors(2)[1:]),
        "query is a Subclass",
    ),
    "unequal grouped heads": (
        lambda: sdpa(*tensors(2, heads=2)[:2], tensors(2, heads=1)[2], enable_gqa=True),
        "same heads",
    ),
}


@pytest.mark.falls_back
@pytest.mark.parametrize("name", FALLING_BACK)
def test_fallbacks_are_recorded(name: str) -> None:
    call, reason = FALLING_BACK[name]
    want = call()
    with (
        pt.activate(),
        pt.use_backend(attention="reference"),
        warnings.catch_warnings(record=True) as output,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            got = call()
    assert type(got) is type(want)
    assert torch.equal(got, want)
    (record,) = pt.fallbacks()
    assert record.op == "scaled_dot_product_attention"
    assert reason in record.reason
    assert record.call_site.startswith("test_activate.py:")
    assert record.count == 2
    assert sum(reason in str(w.message) for w in output) == 1


@pytest.mark.falls_back
def test_strict_refuses_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")
    with pt.activate(), pytest.raises(pt.BackendError, match="query is a Subclass"):
        FALLING_BACK["subclass"][0]()


@pytest.mark.falls_back
def test_reference_is_never_an_implicit_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel, which needs linear memory, runs if no fused backend supports a call."""
    from pytransformer.ops._core.registry import OPS

    monkeypatch.setattr(
        OPS["attention"], "backends", {"reference": OPS["attention"].backends["reference"]}
    )
    with (
        pytest.warns(RuntimeWarning, match="PyTorch's own kernel: no fused backend"),
        pt.activate(),
        trace() as ran,
    ):
        assert torch.equal(sdpa(*tensors(2)), sdpa(*tensors(2)))
    assert ran == []


@pytest.mark.falls_back
@pytest.mark.filterwarnings("ignore:pytransformer.scaled_dot_product_attention")
def test_bad_input_raises_pytorchs_error(backend: str) -> None:
    q, k, v = tensors(2)
    bad: list[Callable[[], Any]] = [
        lambda: sdpa(q, k[..., :4], v),
        lambda: sdpa(q, k.double(), v),
        lambda: sdpa(q, k, v, attn_mask=torch.ones(7, 9, dtype=torch.int64)),
        lambda: sdpa(q, k, v, attn_mask=torch.ones(7, 5, dtype=torch.bool)),
        lambda: sdpa(q, k[:, :2], v[:, :2]),
    ]
    for call in bad:
        with pytest.raises(RuntimeError) as theirs:
            call()
        with pt.activate(), pytest.raises(RuntimeError) as ours:
            call()
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("keys, values", [(9, 5), (5, 9), (900, 1)])
@pytest.mark.parametrize(
    "settings", [{}, dict(is_causal=True), dict(dropout_p=0.1), dict(enable_gqa=True)], ids=str
)
def test_keys_and_values_of_different_lengths_are_refused(
    keys: int, values: int, settings: dict[str, Any]
) -> None:
    """PyTorch's flash kernel reads past the end of the shorter one and returns that memory."""
    q, k, v = (torch.randn(2, 4, n, 8) for n in (7, keys, values))
    calls = [
        (q, k, v),
        (q[0], k[0], v[0]),
        (q.half(), k.half(), v.half()),
        (q.int(), k.int(), v.int()),
    ]
    with pt.activate():
        for inputs in calls:
            with pytest.raises(
                ValueError,
                match=r"key and value must have the same length, got key \(.* and value \(",
            ):
                sdpa(*inputs, **settings)


# ---- the switch


@pytest.fixture
def calls_ours() -> Callable[[], bool]:
    def ours() -> bool:
        with pt.use_backend(attention="reference"), trace() as ran:
            sdpa(*tensors(2))
        return bool(ran)

    return ours


def test_activations_nest_and_repeat(calls_ours: Callable[[], bool]) -> None:
    assert not calls_ours()
    with pt.activate():
        with pt.activate():
            assert calls_ours()
        assert calls_ours()
        pt.activate()
    assert calls_ours(), "the inner activate() was for good"
    pt.deactivate()
    assert not calls_ours()
    pt.deactivate()
    with pt.activate():
        pt.deactivate()
        assert not calls_ours()
    assert not calls_ours()


def test_errors_restore_pytorch(calls_ours: Callable[[], bool]) -> None:
    with pytest.raises(KeyError), pt.activate():
        raise KeyError
    assert not calls_ours()


@pytest.mark.parametrize("before", [True, False])
def test_torch_fast_path_is_off_while_active_and_restored(before: bool) -> None:
    torch.backends.mha.set_fastpath_enabled(before)
    try:
        with pt.activate():
            assert not torch.backends.mha.get_fastpath_enabled()
            with pt.activate():
                pass
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() is before
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_deactivation_restores_pytorchs_bits() -> None:
    q, k, v = tensors(2)
    key = "aten::scaled_dot_product_attention"
    before, table = sdpa(q, k, v), torch._C._dispatch_dump_table(key)
    with pt.activate():
        assert torch._C._dispatch_dump_table(key) != table
    assert torch._C._dispatch_dump_table(key) == table
    assert torch.equal(sdpa(q, k, v), before)


def test_activation_emits_no_override_warning() -> None:
    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        with pt.activate():
            pass
    assert output == []


def test_threads_may_activate_concurrently() -> None:
    q, k, v = tensors(2)
    want, errors = sdpa(q, k, v), []

    def work() -> None:
        try:
            for _ in range(20):
                with pt.activate():
                    assert_same_elements(sdpa(q, k, v), want)
        except BaseException as error:
            errors.append(error)

    with pt.use_backend(attention="reference"), pt.activate():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert drop_in.is_active()
    assert errors == []
