# SPDX-License-Identifier: Apache-2.0
"""Checks the fallback of a backend that fails before its kernel runs, on every dispatch path.

The result must be correct and there must be one message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import pytransformer as pt
from pytransformer.ops._core import registry as _registry
from support.hugging_face import (
    FAMILIES,
    distance,
    flat,
    inputs_of,
    model_distance_limit,
    run,
)
from support.models import random_sum

# CUDA driver and runtime errors of a refused launch, and errors of a kernel that ran or of low
# memory.
REFUSED = (
    "invalid argument",
    "no kernel image is available for execution on the device",
    "the provided PTX was compiled with an unsupported toolchain.",
    "too many resources requested for launch",
)
FAULTS = (
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "unspecified launch failure",
    "out of memory",
    "operation not permitted when stream is capturing",
)


def _differentiated(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Return the output for random query, key and value, and their gradients."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(2, 3, 20, 16, generator=generator).requires_grad_() for _ in range(3)
    )
    out = call(query, key, value)
    return [out.detach(), *torch.autograd.grad(random_sum(out), [query, key, value])]


def attention() -> list[torch.Tensor]:
    return _differentiated(lambda q, k, v: pt.attention(q, k, v, causal="bottom_right"))


def activated() -> list[torch.Tensor]:
    with pt.activate():
        return _differentiated(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)
        )


def hugging_face() -> list[torch.Tensor]:
    pytest.importorskip("transformers", reason='transformers is not installed (the extra "hf")')
    pt.integrations.transformers.register()
    family = FAMILIES["bert"]
    logits, grads = run(
        family.build("pytransformer"), family, inputs_of(family, "right", batch=2, length=8)
    )
    return [logits, flat(grads)]


WAYS = {way.__name__: way for way in (attention, activated, hugging_face)}


def failing(error: Callable[[], Exception]) -> Callable[..., NoReturn]:
    """Return a launch replacement that raises the error, or the error of building it."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error()

    return fail


@contextlib.contextmanager
def preferred(
    backend: str, *, then: str = "cpu", only_backward: Exception | None = None
) -> Iterator[None]:
    """Give attention two backends: `backend`, as if native on the CPU, and its fallback `then`.

    With `only_backward`, only its backward fails.
    """
    op = _registry.OPS["attention"]
    saved, first = op.backends, op.backends[backend]
    if only_backward is not None:
        error = only_backward
        first = dataclasses.replace(first, backward=failing(lambda: error))
    op.backends = {backend: first} | {
        name: b for name, b in saved.items() if name in (then, "reference") and name != backend
    }
    pt.clear_fallbacks()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(_registry.HOME, backend, "cpu")
            yield
    finally:
        op.backends = saved
        pt.clear_fallbacks()


def check(
    way: str, want: list[torch.Tensor], backend: str, says: str, fails: str = "attention_fwd"
) -> None:
    """Assert that two calls on a failing backend are right, with one warning and no second try.

    Under activate(), PyTorch's kernel computes, never the reference.
    """
    with warnings.catch_warnings(record=True) as told, _registry.trace() as ran:
        warnings.simplefilter("always")
        results = [WAYS[way](), WAYS[way]()]
    for got in results:
        for mine, theirs in zip(got, want, strict=True):
            assert distance(mine, theirs) < model_distance_limit(torch.float32)
    assert ran.count((fails, backend)) == 1, f"{backend} was to fail once: {ran}"
    assert way != "activated" or ("attention_fwd", "reference") not in ran
    messages = [str(w.message) for w in told if backend in str(w.message)]
    assert len(messages) == 1, messages
    assert says in messages[0] and f"{backend}: did not run" in messages[0]
    reasons = {f.reason for f in pt.fallbacks()}
    assert len(reasons) == 1 and says in reasons.pop()
