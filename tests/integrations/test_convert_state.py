# SPDX-License-Identifier: Apache-2.0
"""A converted module remembers its condition's result, and notices what may change it.

csrc/fast_path/modules.cpp compares the state of a module with the remembered one. The sweeps of
test_convert_guards.py change modules after a call; here are the state's own properties.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pytransformer as pt
from pytransformer.integrations.convert import rules
from pytransformer.ops._core import fast_path

pytestmark = pytest.mark.skipif(
    fast_path.why_not() is not None, reason=f"no C++ fast path: {fast_path.why_not()}"
)
KEY = "_pytransformer_forward"


class Holder(nn.Module):
    """Modules, a buffer and settings of every kind that a condition may read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.inner = nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 4))
        self.register_buffer("table", torch.zeros(4))
        self.rate, self.name, self.function, self.nothing = 0.123456, "gelu", torch.relu, None


def state_of(module: nn.Module, result: bool = True) -> Any:
    return rules._remembered(module, (), result)


def unchanged(state: Any, module: nn.Module) -> bool:
    return fast_path.entries.recall(state, module, rules._GLOBAL_HOOKS) is not None


def replace_data(module: Holder) -> None:
    module.linear.weight.data = module.linear.weight.data.double()


def change_class(module: Holder) -> None:
    module.inner[1].__class__ = type("Other", (nn.Linear,), {})


def set_forward_of_class(module: Holder) -> None:
    nn.Dropout.forward = lambda self, x: x  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "hook": lambda m: m.inner[0].register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m.norm.register_full_backward_hook(lambda *_: None),
    "forward of an instance": lambda m: setattr(m.inner[1], "forward", torch.relu),
    "another module": lambda m: setattr(m, "norm", nn.LayerNorm(4, eps=1e-3)),
    "no module": lambda m: setattr(m, "norm", None),
    "an inner module": lambda m: m.inner.__setitem__(0, nn.Identity()),
    "one more module": lambda m: m.inner.append(nn.Identity()),
    "one module less": lambda m: m.inner.pop(1),
    "mode": lambda m: m.train(),
    "mode of one": lambda m: m.inner[0].train(),
    "rate": lambda m: setattr(m.inner[0], "p", 0.5),
    "setting": lambda m: setattr(m, "rate", m.rate * 2),
    "function": lambda m: setattr(m, "function", torch.tanh),
    "something": lambda m: setattr(m, "nothing", 1),
    "one more": lambda m: setattr(m, "more", 1),
    "one less": lambda m: delattr(m, "name"),
    "no bias": lambda m: setattr(m.linear, "bias", None),
    "dtype by data": replace_data,
    "dtype": lambda m: m.double(),
    "device": lambda m: m.to("meta"),
    "more dimensions": lambda m: setattr(m, "table", torch.zeros(1, 4)),
    "class": change_class,
    "forward of a class": set_forward_of_class,
    "dictionary": lambda m: setattr(m, "__dict__", {**vars(m), "rate": 1.0}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Dropout, "forward", nn.Dropout.forward)  # restores it afterwards
    module = Holder().eval()
    state = state_of(module)
    assert unchanged(state, module)
    CHANGES[name](module)
    assert not unchanged(state, module)
    assert unchanged(state_of(module), module)


@pytest.mark.parametrize("register", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_all_modules_are_noticed(register: str) -> None:
    module = Holder()
    state = state_of(module)
    add = getattr(nn.modules.module, f"register_module_{register}_hook")
    handle = add(lambda *_: None)
    try:
        assert not unchanged(state, module)
    finally:
        handle.remove()
    assert unchanged(state, module)


@pytest.mark.parametrize("result", [False, True])
def test_the_result_is_remembered(result: bool) -> None:
    module = Holder()
    state = state_of(module, result)
    assert fast_path.entries.recall(state, module, rules._GLOBAL_HOOKS) is result


def test_new_values_of_weights_are_no_change() -> None:
    module = Holder()
    state = state_of(module)
    with torch.no_grad():
        module.linear.weight.mul_(2)
    module.linear.weight = nn.Parameter(torch.randn(4, 4))
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
    module.inner[1].weight.grad = torch.ones(4, 4)
    assert unchanged(state, module)


def test_a_state_keeps_no_weight_and_no_module_alive() -> None:
    """Without the garbage collector: a deleted model must free its memory at once."""
    module = Holder()
    vars(module)[KEY] = state_of(module)
    weight, norm = weakref.ref(module.linear.weight), weakref.ref(module.norm)
    gc.disable()
    try:
        module.linear.weight = nn.Parameter(torch.randn(4, 4))
        del module.norm
        assert weight() is None and norm() is None
        whole = weakref.ref(module)
        del module
        assert whole() is None
    finally:
        gc.enable()


def test_cycles_through_a_state_are_collected() -> None:
    module = Holder()
    module.function = functools.partial(Holder.forward, module)
    vars(module)[KEY] = state_of(module)
    whole = weakref.ref(module)
    del module
    gc.collect()
    assert whole() is None


def test_a_module_inside_itself_has_no_state() -> None:
    module = Holder()
    module.inner.append(module.inner)
    assert fast_path.entries.remember(module, (), (), True) is None


def test_a_state_of_another_module_is_no_state() -> None:
    first, second = Holder(), Holder()
    second.rate = 2.0 * first.rate
    assert not unchanged(state_of(first), second)
    assert not unchanged(None, first)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_make_their_own_state(copied: Callable[[nn.Module], nn.Module]) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    pt.integrations.convert(layer)
    with torch.no_grad():
        expected = layer(x)
        assert unchanged(vars(layer)[KEY], layer)
        twin = copied(layer)
        assert vars(twin)[KEY] is None
        assert torch.equal(twin(x), expected)
        assert unchanged(vars(twin)[KEY], twin)


def test_a_condition_runs_once_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).eval()
    rule = rules.find_rule(nn.TransformerEncoderLayer)
    assert rule is not None
    seen: list[nn.Module] = []

    def condition(module: nn.Module) -> str | None:
        seen.append(module)
        return rule.condition(module)

    counted = type(rule)(rule.kind, rule.what, rule.mixin, condition, rule.digests)
    layer.__class__ = counted.subclass(nn.TransformerEncoderLayer)
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        assert len(seen) == 1
        layer.train().eval()
        layer(x)
        assert len(seen) == 1  # the same objects again
        layer.dropout1.p = 0.5
        layer(x)
        layer(x)
        assert len(seen) == 2
        hook = layer.linear1.register_forward_hook(lambda *_: None)
        layer(x)
        layer(x)
        assert len(seen) == 3  # false is remembered too
        hook.remove()
        layer(x)
        assert len(seen) == 4


def test_revert_leaves_no_state() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).eval()
    before = set(vars(layer))
    pt.integrations.convert(layer)
    with torch.no_grad():
        layer(torch.randn(2, 5, 16))
    assert KEY in vars(layer)
    pt.integrations.revert(layer)
    assert set(vars(layer)) == before
