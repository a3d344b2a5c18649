# SPDX-License-Identifier: Apache-2.0
"""The C++ fast path gives the Python path's bits, and its autograd nodes are ordinary nodes."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pytransformer as pt
from pytransformer.ops._core import fast_path
from support.paths import (
    attention_in_both,
    needs_fast_path,
    norm_taken,
    qkv,
    same,
    same_in_both,
    taken,
)
from support.poison import StrayWrite, poisoned

pytestmark = [needs_fast_path, pytest.mark.usefixtures("one_thread")]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns apart": lambda t: torch.stack((t, t), -1)[..., 0],
    "a slice": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "expanded": lambda t: t[:1].expand(t.shape),
}


def problem(r: random.Random) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    """Return the inputs, the keywords and the tensors that need a gradient."""
    dtype = r.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    lq, lk = r.choice([1, 8, 33]), r.choice([8, 40])
    leaves = qkv(dtype, kv_heads=r.choice([1, 2]), lq=lq, lk=lk, dv=r.choice([16, 24]))
    for t in leaves:
        t.requires_grad_(r.random() < 0.7)
    inputs = [LAYOUTS[r.choice(list(LAYOUTS))](t) for t in leaves]
    options: dict[str, Any] = {
        "causal": r.choice([None, "top_left", "bottom_right"]),
        "return_lse": r.random() < 0.3,
    }
    terms = {
        "attn_mask": [
            (lq, lk),
            (1, lk),
            (2, 1, lq, lk),
            (2, 1, 1, lk),
            (2, 2, lq, lk),
            (2, lq, lk),
            (1, 1, 1, 1),
        ],
        "bias": [(1, 2, lq, lk), (lq, lk)],
    }
    for name, shapes in terms.items():
        if r.random() < 0.4:
            term = torch.randn(r.choice(shapes), dtype=r.choice([dtype, torch.float32]))
            options[name] = term > -1 if name == "attn_mask" and r.random() < 0.5 else term
            if options[name] is term and r.random() < 0.6:
                leaves.append(term.requires_grad_())
    choices: dict[str, Callable[[], Any]] = {
        "window": lambda: r.choice([(3, 3), (None, 4), (2, None), (None, None)]),
        "query_lengths": lambda: torch.tensor([lq, lq // 2]),
        "key_lengths": lambda: torch.tensor([lk // 2, lk]),
        "prefix_lengths": lambda: torch.tensor([2, 5]) if options["causal"] else None,
        "query_segments": lambda: torch.randint(0, 2, (2, lq)),
        "dropout_p": lambda: 0.25,
        "softcap": lambda: 5.0,
        "scale": lambda: 0.3,
    }
    options |= {name: choose() for name, choose in choices.items() if r.random() < 0.25}
    if "query_segments" in options:
        options["key_segments"] = torch.randint(0, 2, (2, lk))
    if "dropout_p" in options:
        options["dropout_seed"] = r.choice([None, torch.tensor(5)])
    return inputs, options, [t for t in leaves if t.requires_grad]


@pytest.mark.parametrize("case", range(200))
def test_attention_equals_the_python_path_bitwise(case: int) -> None:
    inputs, options, expected = problem(random.Random(case))
    with torch.no_grad():
        assert taken(*inputs, **options)
    attention_in_both(inputs, expected, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [32, (32,), (4, 32), torch.Size((32,))])
@pytest.mark.parametrize("affine", [(), ("weight",), ("weight", "bias")])
def test_layer_norm_equals_the_python_path_bitwise(
    dtype: torch.dtype, shape: Any, affine: tuple[str, ...]
) -> None:
    x = torch.randn(3, 4, 32, dtype=dtype, requires_grad=True)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    parameters = {name: torch.randn(sizes, dtype=dtype, requires_grad=True) for name in affine}
    assert norm_taken(x, shape, **parameters)
    same_in_both(pt.layer_norm, (x, shape), (x, *parameters.values()), **parameters)
    if len(sizes) == 1:
        across = x.transpose(0, 1)
        assert not norm_taken(across, shape)
        same_in_both(pt.layer_norm, (across, shape), (x, *parameters.values()), **parameters)


def test_layer_norm_with_weights_of_another_dtype() -> None:
    x, w, b = (
        torch.randn(3, 32, dtype=torch.bfloat16, requires_grad=True),
        *torch.randn(2, 32, requires_grad=True).unbind(),
    )
    assert norm_taken(x, 32, w, b)
    same_in_both(pt.layer_norm, (x, 32, w, b), (x, w, b))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1},
        {"dropout_p": 1},
        {"dropout_p": 0.5, "dropout_seed": torch.tensor([7])},
        {"window": [2, 2]},
        {"strict": 1},
    ],
    ids=str,
)
def test_calls_that_need_conversion_use_the_python_path(options: dict[str, Any]) -> None:
    inputs = qkv()
    assert not taken(*inputs, **options)
    attention_in_both(inputs, inputs, **options)


@pytest.mark.parametrize("lengths", [(0, 8), (8, 0), (0, 0)])
def test_empty_inputs_equal_the_python_path(lengths: tuple[int, int]) -> None:
    inputs = qkv(lq=lengths[0], lk=lengths[1])
    attention_in_both(inputs, inputs)


# ---- gradients


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=3))[1:])
def test_subsets_of_gradients_equal_the_python_path(wanted: tuple[bool, ...]) -> None:
    inputs = qkv()
    some = [t for t, want in zip(inputs, wanted) if want]
    attention_in_both(inputs, some)
    for t, want in zip(inputs, wanted):
        t.requires_grad_(want)
    attention_in_both(inputs, some)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["attn_mask", "bias"])
def test_gradients_of_score_terms_have_their_memory_order(name: str, dtype: torch.dtype) -> None:
    term = torch.randn(2, 8, 2, 8, dtype=dtype).transpose(1, 2).requires_grad_()
    attention_in_both(qkv(dtype, grad=False), [term], **{name: term})


def test_gradient_of_lse_alone() -> None:
    inputs = qkv(torch.bfloat16)

    def lse(*tensors: Tensor) -> Tensor:
        return pt.attention(*tensors, return_lse=True)[1]

    same_in_both(lse, inputs, inputs[:2])


def test_second_derivatives_equal_the_python_path() -> None:
    inputs = [t.detach()[:1, :, :4].requires_grad_() for t in qkv(torch.float64)]
    bias = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    x, w, b = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,), (5,))
    )
    assert taken(*inputs, bias=bias) and norm_taken(x, 5, w, b)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return pt.attention(q, k, v, bias=bias, causal="top_left", return_lse=True)

    assert torch.autograd.gradgradcheck(attend, (*inputs, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(
        lambda x, w, b: pt.layer_norm(x, 5, w, b), (x, w, b), fast_mode=True
    )


def test_batched_gradients_equal_the_python_path() -> None:
    q, k, v = qkv()
    out = pt.attention(q, k, v)
    upstream = torch.randn(3, *out.shape)
    got = torch.autograd.grad(out, q, upstream, is_grads_batched=True, retain_graph=True)[0]
    torch.testing.assert_close(
        got, torch.stack([torch.autograd.grad(out, q, g, retain_graph=True)[0] for g in upstream])
    )


def test_tangents_in_backward_are_propagated() -> None:
    def tangent() -> Any:
        torch.manual_seed(0)
        q, k, v = qkv()
        g = torch.randn_like(q)
        with torch.autograd.forward_ad.dual_level():
            (dq,) = torch.autograd.grad(
                pt.attention(q, k, v), q, torch.autograd.forward_ad.make_dual(g, g)
            )
            return torch.autograd.forward_ad.unpack_dual(dq).tangent

    with pytest.raises((RuntimeError, NotImplementedError)) as mine:
        tangent()
    with fast_path.off(), pytest.raises(type(mine.value)):
        tangent()


@pytest.mark.unpoisoned
@pytest.mark.parametrize("op", ["attention", "layer_norm"])
def test_compiled_autograd_equals_eager(op: str) -> None:
    from torch._dynamo.compiled_autograd import _enable

    def gradients(compiled: bool) -> list[Tensor]:
        torch.manual_seed(3)
        inputs = (
            qkv()
            if op == "attention"
            else [torch.randn(8, 16, requires_grad=True), torch.randn(16, requires_grad=True)]
        )
        out = (
            pt.attention(*inputs, causal="top_left")
            if op == "attention"
            else pt.layer_norm(inputs[0], 16, inputs[1])
        )
        loss = out.square().sum()
        if compiled:
            with _enable(lambda graph: torch.compile(graph, backend="aot_eager", fullgraph=True)):
                loss.backward()
        else:
            loss.backward()
        return [t.grad for t in inputs if t.grad is not None]

    for a, b in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.unpoisoned
def test_compiled_autograd_distinguishes_calls_by_their_scalars() -> None:
    """Calls that differ only in a scale need different backward graphs."""
    from torch._dynamo.compiled_autograd import _enable

    compiler = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    for scale in (0.25, 1.5):
        q, k, v = qkv()
        loss = pt.attention(q, k, v, scale=scale).square().sum()
        (want,) = torch.autograd.grad(loss, q, retain_graph=True)
        with _enable(compiler):
            loss.backward()
        torch.testing.assert_close(q.grad, want)


# ---- what the engine and its users do to a node


def test_inference_mode_and_no_grad() -> None:
    q, k, v = qkv()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = pt.attention(q, k, v)
            assert (
                taken(q, k, v)
                and not out.requires_grad
                and out.is_inference() == (mode is torch.inference_mode)
            )
    with torch.inference_mode():
        i = torch.randn(2, 2, 8, 16)
    assert taken(i, i, i)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        pt.attention(q, i, i)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_repeats_the_dropout_mask(reentrant: bool) -> None:
    inputs = qkv()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = pt.attention(pt.layer_norm(q, 16), k, v, dropout_p=0.5)
        return pt.attention(first, k, pt.layer_norm(v, 16), dropout_p=0.2)

    got = []
    for call in (block, lambda *t: checkpoint(block, *t, use_reentrant=reentrant)):
        torch.manual_seed(1)
        for t in inputs:
            t.grad = None
        call(*inputs).square().sum().backward()
        got.append([t.grad for t in inputs])
    same(*got)


def test_saved_tensor_hooks_see_every_saved_tensor() -> None:
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = pt.attention(*qkv())
    assert len(packed) == 5  # query, key, value, out, lse
    out.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        pt.attention(*qkv()).sum().backward()


def test_hook_errors_propagate_without_a_retry() -> None:
    calls: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        calls.append(t)
        raise KeyError("mine")

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        pytest.raises(KeyError, match="mine"),
    ):
        pt.attention(*qkv())
    assert len(calls) == 1


def test_autograd_errors_equal_the_python_path() -> None:
    q, k, v = qkv()
    out = pt.attention(q, k, v)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    copied = k.clone()
    out = pt.attention(q, copied, v)
    copied.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()
    out = pt.attention(q, k, v)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()
    with torch.autograd.detect_anomaly(check_nan=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pt.attention(q, k, v).sum().backward()


def test_node_has_hooks_and_a_name() -> None:
    q, k, v = qkv()
    out = pt.attention(q, k, v)
    assert out.grad_fn is not None and out.grad_fn.name() == "attention_functionBackward"
    seen = []
    out.register_hook(lambda g: seen.append("tensor") or g * 2)
    out.grad_fn.register_prehook(lambda g: seen.append("pre"))
    out.grad_fn.register_hook(lambda i, o: seen.append("post"))
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert sorted(seen) == ["post", "pre", "tensor"]
    same([dq], torch.autograd.grad(2 * pt.attention(q, k, v).sum(), q))


# ---- its memory


@pytest.mark.unpoisoned
def test_allocations_are_poisoned_and_guarded() -> None:
    with poisoned() as guards:
        q = torch.randn(1, 1, 4, 8, requires_grad=True)
        assert taken(q, q, q)
        before = len(guards)
        out = pt.attention(q, q, q)
        assert len(guards) == before + 2  # out, lse
        out.sum().backward()
        assert len(guards) > before + 2
    with pytest.raises(StrayWrite), poisoned() as guards:
        pt.layer_norm(q, 8)
        guards[0].buffer.zero_()
