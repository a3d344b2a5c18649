# SPDX-License-Identifier: Apache-2.0
"""A converted model equals its unconverted twin after any change of an inner module.

The sweep changes each module before or after convert(): hooks, a ``forward`` of the instance, other
classes, parametrizations, and the mode of dropouts. A fused module that bypasses the changed one
must fall back.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import pytransformer as pt
from pytransformer.integrations.convert import code
from pytransformer.integrations.convert.rules import KINDS, RULES, find_rule
from support.hugging_face import FAMILIES, distance, inputs_of, model_distance_limit

LIMIT = model_distance_limit(torch.float32)
QUICK = ("bert", "gpt2", "llama")
QUICK_CODE = ("bert", "t5")
LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


class Negated(nn.Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 1.25 * weight


def scaled(output: Any) -> Any:
    """Return the output, or its first tensor, times 1.5."""
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        return 1.5 * output
    return (
        (scaled(output[0]), *output[1:])
        if isinstance(output, tuple) and type(output) is tuple
        else output
    )


def parent_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def hook(model: nn.Module, name: str) -> bool:
    model.get_submodule(name).register_forward_hook(lambda m, args, output: scaled(output))
    return True


def pre_hook(model: nn.Module, name: str) -> bool:
    model.get_submodule(name).register_forward_pre_hook(
        lambda m, args: (scaled(args[0]), *args[1:]) if args else None
    )
    return True


def instance_forward(model: nn.Module, name: str) -> bool:
    module = model.get_submodule(name)
    own = module.forward
    module.forward = lambda *args, **kwargs: scaled(own(*args, **kwargs))  # type: ignore[method-assign]
    return True


def another_linear(model: nn.Module, name: str) -> bool:
    old = model.get_submodule(name)
    if not isinstance(old, nn.Linear):
        return False
    new = Doubled(old.in_features, old.out_features, old.bias is not None)
    new.load_state_dict(old.state_dict())
    setattr(*parent_of(model, name), new)
    return True


def parametrization(model: nn.Module, name: str) -> bool:
    module = model.get_submodule(name)
    if not isinstance(getattr(module, "weight", None), nn.Parameter):
        return False
    parametrize.register_parametrization(module, "weight", Scaled())
    return True


def another_activation(model: nn.Module, name: str) -> bool:
    module = model.get_submodule(name)
    if not type(module).__module__.endswith("activations") and not isinstance(
        module, (nn.ReLU, nn.GELU, nn.SiLU)
    ):
        return False
    setattr(*parent_of(model, name), nn.Tanh())
    return True


def training_dropout(model: nn.Module, name: str) -> bool:
    module = model.get_submodule(name)
    if not isinstance(module, nn.Dropout):
        return False
    module.train().p = 1.0  # drops everything, whichever generator draws the mask
    return True


def another_dropout(model: nn.Module, name: str) -> bool:
    if not isinstance(model.get_submodule(name), nn.Dropout):
        return False
    setattr(*parent_of(model, name), Negated())
    return True


def no_dropout(model: nn.Module, name: str) -> bool:
    if not isinstance(model.get_submodule(name), nn.Dropout):
        return False
    setattr(*parent_of(model, name), nn.Identity())
    return True


CHANGES: dict[str, Callable[[nn.Module, str], bool]] = {
    f.__name__: f
    for f in (
        hook, pre_hook, instance_forward, another_linear, parametrization, another_activation,
        training_dropout,
        another_dropout, no_dropout,
    )
}  # fmt: skip


def differing(
    build: Callable[[], nn.Module],
    call: Callable[[nn.Module], torch.Tensor],
    on_ours: Callable[[], nn.Module] | None = None,
) -> tuple[int, list[str]]:
    """Return the numbers of cases and of failures.

    A case fails if the converted model differs from the unconverted one or raises. The change comes
    before convert, after it, or after a call, which remembers that the conditions were true. That
    model is from ``on_ours``, which may build it on our attention.
    """
    cases, wrong = 0, []
    for name, _ in build().named_modules():
        if not name or ".1." in f"{name}.":  # one layer per class
            continue
        for what, change in CHANGES.items():
            expected_of, before, after, called = build(), build(), build(), (on_ours or build)()
            if not change(expected_of, name):
                continue
            for model in (after, called):
                assert pt.integrations.convert(model).converted
            outcome(call, called)
            for model in (after, called, before):
                change(model, name)
            pt.integrations.convert(before)
            expected = outcome(call, expected_of)
            for order, model in (
                ("after", after),
                ("after a call and", called),
                ("before", before),
            ):
                cases += 1
                found = outcome(call, model)
                if isinstance(expected, str) or isinstance(found, str):
                    if found != expected:
                        wrong.append(
                            f"{what} of {name}, {order} convert: {found}, expected {expected}"
                        )
                elif not torch.equal(found, expected) and not distance(found, expected) < LIMIT:
                    wrong.append(
                        f"{what} of {name}, {order} convert: off by {distance(found, expected):.1e}"
                    )
    return cases, wrong


def outcome(call: Callable[[nn.Module], torch.Tensor], model: nn.Module) -> torch.Tensor | str:
    try:
        with torch.no_grad():
            return call(model)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else (pytest.mark.slow,)) for n in FAMILIES]
)
def test_hugging_face_models_equal_their_unconverted_twins(hugging_face: Any, name: str) -> None:
    family = FAMILIES[name]
    inputs = inputs_of(family, "none")
    cases, wrong = differing(
        lambda: family.build("eager"),
        lambda model: model(**inputs).logits,
        lambda: family.build("pytransformer"),
    )
    assert cases > 100 and not wrong, f"{len(wrong)} of {cases}:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize(
    ("activation", "norm_first"), [("gelu", True), (nn.GELU(), False)], ids=["function", "module"]
)
def test_torch_layers_equal_their_unconverted_twins(activation: Any, norm_first: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        # Leave out nn.Transformer: it copies its layers, and torch's copy of a layer loses an
        # activation that is a module.
        made = [
            cls(16, 2, 24, activation=activation, batch_first=True, norm_first=norm_first)
            for cls in LAYERS
        ]
        return nn.ModuleDict(dict(zip(("encoder", "decoder"), made))).eval()

    x, y = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # PyTorch's fast path bypasses changed modules
    try:
        cases, wrong = differing(build, lambda model: model["decoder"](y, model["encoder"](x)))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    assert cases > 60 and not wrong, f"{len(wrong)} of {cases}:\n" + "\n".join(wrong[:20])


def replaceable(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield (class or file, name) of every forward and every function in a rule's method."""
    found: list[tuple[Any, str]] = []
    for cls in dict.fromkeys(type(m) for m in model.modules()):
        found.append((cls, "forward"))
        if (rule := find_rule(cls)) is not None:
            for one in (rule, *rule.also):
                found += [(place.owner, place.name) for place in code.reached(cls, one.method)]
    return iter(dict.fromkeys(found))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK_CODE else (pytest.mark.slow,)) for n in FAMILIES],
)
def test_replaced_code_in_a_class_or_file_takes_effect(
    hugging_face: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced forward or function counts before and after convert(), behind a wrapper too."""
    family = FAMILIES[name]
    inputs = inputs_of(family, "none")
    call = lambda model: model(**inputs).logits
    cases, wrong, plain = 0, [], outcome(call, family.build("eager"))
    for owner, attribute in replaceable(family.build("eager")):
        own = getattr(owner, attribute)
        if not callable(own):  # a property
            continue
        plain_new = lambda *args, own=own, **kwargs: scaled(own(*args, **kwargs))
        wrapper = functools.wraps(own)(lambda *args, new=plain_new, **kwargs: new(*args, **kwargs))
        for order, new in (
            ("after", wrapper),
            ("after a call", wrapper),
            ("before", wrapper),
            ("before", plain_new),
        ):
            model = family.build("pytransformer" if order == "after a call" else "eager")
            if order != "before":
                pt.integrations.convert(model)
            if order == "after a call":
                outcome(call, model)
            with monkeypatch.context() as patch:
                patch.setattr(owner, attribute, new)
                expected = outcome(call, family.build("eager"))
                if order == "before":
                    pt.integrations.convert(model)
                found = outcome(call, model)
            cases += not isinstance(plain, str) and not (
                isinstance(expected, torch.Tensor) and torch.equal(plain, expected)
            )
            if isinstance(expected, str) or isinstance(found, str):
                if found != expected:
                    wrong.append(
                        f"{owner.__name__}.{attribute}, {order}: {found}, expected {expected}"
                    )
            elif not torch.equal(found, expected) and not distance(found, expected) < LIMIT:
                wrong.append(
                    f"{owner.__name__}.{attribute}, {order}: off by {distance(found, expected):.1e}"
                )
    assert cases > 10 and not wrong, f"{len(wrong)} of {cases}:\n" + "\n".join(wrong[:20])


def test_every_method_that_a_rule_replaces_is_checked(hugging_face: Any) -> None:
    """A mixin's other methods would override the class's own without the check of each call."""
    seen = 0
    for key, rule in RULES.items():
        file, _, name = key.rpartition(".") if isinstance(key, str) else ("", "", "")
        try:
            cls = getattr(importlib.import_module(file), name) if file else key
        except (ImportError, AttributeError):  # timm, or another transformers
            continue
        seen += 1
        rules = (rule, *rule.also)
        ours = {n for one in rules for c in one.mixin.__mro__[:-1] for n in vars(c)}
        replaced = {n for n in ours if not n.startswith("__") and hasattr(cls, n)}
        assert replaced <= {one.method for one in rules}, key
    assert seen > 80


@pytest.mark.parametrize("kinds", [("block",), KINDS], ids=["block", "all"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_layers_can_be_called_alone_and_without_a_mask(
    hugging_face: Any, name: str, kinds: tuple[str, ...]
) -> None:
    from transformers import AutoConfig, AutoModel

    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
    )
    small = dict(n_embd=32, n_head=2, n_layer=1) if name == "gpt2" else {**sizes, "head_dim": 16}
    torch.manual_seed(0)
    model = AutoModel.from_config(
        AutoConfig.for_model(name, vocab_size=20, attn_implementation="eager", **small)
    ).eval()
    x = torch.randn(1, 5, 32)
    layer = model.h[0] if name == "gpt2" else model.layers[0]
    more = (
        {}
        if name == "gpt2"
        else {"position_embeddings": model.rotary_emb(x, torch.arange(5)[None])}
    )
    with torch.no_grad():
        expected = layer(x, **more)
        assert pt.integrations.convert(model, kinds=kinds).converted
        found = layer(x, **more)
    first = lambda out: out[0] if isinstance(out, tuple) else out
    assert distance(first(found), first(expected)) < LIMIT
