# SPDX-License-Identifier: Apache-2.0
"""The probe: it decides about a class in the rules whose source has an unknown digest.

A twin of the module, small in inputs and with random weights and settings, runs its code and the
fused code. Outputs, caches and gradients must agree in eval and training, for every combination of
optional arguments, every flag that the code reads and every place of a dropout. The code must also
be such that equal numbers prove it (:mod:`.observed_code`). One difference refuses the class.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from . import code, modules
from .observed_code import Record, Unproven, copied
from .rules import Rule, guarded, original_class

LIMIT = 32  # in eps, of the 2-norm of a difference over the norm of the result
BATCH, LENGTH, FEW, CACHED, ENCODED = 2, 5, 2, 3, 4
MOST_WEIGHTS = 2**28  # of a twin, 1 GB
FIRST = ("hidden_states", "x", "input", "attention_output")
OPTIONAL = ("attention_mask", "past_key_values", "encoder_hidden_states")
CACHES = ("past_key_values", "cache", "layer_past")
# Conditions with one outcome while a module is fused: its weights are plain and of one dtype.
ALWAYS = re.compile(
    r"isinstance\(self\.wo\.weight, torch\.Tensor\)|self\.wo\.weight\.dtype != torch\.int8"
    r"|\w+\.dtype != self\.wo\.weight\.dtype"
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# By class, method and bypassed classes.
_seen: dict[tuple[Any, ...], _Class] = {}


class _Class:
    """The state of the probe of a class: its observed copy and the record of its runs."""

    def __init__(self, cls: type, method: str, bypassed: list[type]) -> None:
        self.methods = ((cls, method), *((inner, "forward") for inner in bypassed))
        self.reached = [code.reached(*place) for place in self.methods]
        self.record = Record()
        self.reason: str | None = None
        self.configurations: set[str] = set()
        self.conditions: dict[str, str] = {}
        self.names: set[str] = set()  # attributes that the code reads
        self.copies: dict[type, type] = {}
        namespaces: dict[int, dict[str, Any]] = {}
        try:
            for place in self.methods:
                self.copies[place[0]] = self._copy(*place, namespaces)
        except Unproven as error:
            self.reason = str(error)

    def _copy(self, cls: type, method: str, namespaces: dict[int, dict[str, Any]]) -> type:
        methods: dict[str, Any] = {"__module__": cls.__module__}
        for owner, name, found in code.reached(cls, method):
            function = code.function_of(found)
            if function is None:
                raise Unproven(f"its code reads {name}, which is not a function")
            made, conditions = copied(function, self.record, namespaces)
            self.conditions |= conditions
            self.names |= set(function.__code__.co_names)
            if isinstance(owner, type):
                static = isinstance(inspect.getattr_static(owner, name), staticmethod)
                methods[name] = staticmethod(made) if static else made
            else:
                namespaces[id(function.__globals__)][name] = made
        copy_of = type(cls.__name__, (cls,), methods)
        if "forward" not in methods and "forward" in vars(copy_of):
            del copy_of.forward  # type: ignore[attr-defined]  # see rules._subclass
        return copy_of


def why_not(rule: Rule, module: nn.Module) -> str | None:
    """Return why the probe refuses the module's class, or None; it probes once per configuration.

    A class that passes is accepted by :func:`.code.accept`, and with it the unknown classes of
    inner modules that its rule bypasses.
    """
    cls = type(module)
    bypassed = modules.unknown_bypassed(module)
    key = (cls, rule.method, *bypassed)
    state = _seen.get(key)
    if state is None or state.reached != [code.reached(*place) for place in state.methods]:
        state = _seen[key] = _Class(cls, rule.method, bypassed)
    configuration = _configuration(module)
    if state.reason is None and configuration not in state.configurations:
        try:
            with _quiet(), modules.assumed(bypassed):
                _compare(rule, module, state)
            state.configurations.add(configuration)
        except Unproven as error:
            state.reason = str(error)
        except Exception as error:  # unknown code may raise anything; it is left alone
            state.reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if state.reason is not None:
        for place in state.methods:
            code.reject(*place)  # another configuration may have passed
        return state.reason
    one_sided = (state.conditions[at] for at in state.record.one_sided(state.conditions))
    if (text := next((t for t in one_sided if not ALWAYS.fullmatch(t)), None)) is not None:
        return f"its code has the condition {text}, which had one outcome"
    for place in state.methods:
        code.accept(*place)
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed GPUs too
        yield


def _configuration(module: nn.Module) -> str:
    """Return the classes and plain settings of the module and the modules inside, as text."""
    settings: list[Any] = []
    configs: dict[int, dict[str, Any]] = {}
    for name, inner in module.named_modules():
        shapes = [tuple(p.shape) for p in inner._parameters.values() if p is not None]
        settings.append((name, original_class(inner).__qualname__, _plain(vars(inner)), shapes))
        if (config := vars(inner).get("config")) is not None:
            configs[id(config)] = _plain(vars(config))
    settings += configs.values()
    return repr(settings)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in settings.items()
        if isinstance(value, (bool, int, float, str, type(None))) and name != "layer_idx"
    }


def _twin(module: nn.Module) -> Any:
    """Return a copy on the CPU in float32, without hooks, with random weights and settings.

    Dropout has probability 0. A config runs eager attention.
    """
    count = sum(p.numel() for p in module.parameters())
    if count > MOST_WEIGHTS:
        raise Unproven(
            f"its {count:,} weights are too many to probe; convert a smaller model first"
        )
    memo: dict[int, Any] = {}
    for p in module.parameters():
        new = torch.randn(p.shape, dtype=torch.float32, device="cpu")
        memo[id(p)] = nn.Parameter(new * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.5 * new + 0.1)
    for b in module.buffers():
        memo[id(b)] = torch.empty_like(b, device="cpu").copy_(b) if b.device.type != "meta" else b
    twin = copy.deepcopy(module, memo)
    configs: dict[int, Any] = {}
    for inner in twin.modules():
        inner.__dict__.pop("forward", None)
        for hooks in HOOKS:
            getattr(inner, hooks).clear()
        config = inner.__dict__.get("config")
        if config is not None:
            configs[id(config)] = config
        _vary(vars(inner))
    for config in configs.values():
        config._attn_implementation = "eager"
        _vary(vars(config))
    return twin


def _vary(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if type(value) is float:
            drops = "drop" in name or name in ("p", "pdrop")
            settings[name] = (
                0.0 if drops else value + 0.3 + 0.4 * float(torch.rand((), device="cpu"))
            )


def _places(twin: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return each place of a dropout probability."""
    return [
        (m, name)
        for m in twin.modules()
        for name, value in vars(m).items()
        if type(value) is float and ("drop" in name or (isinstance(m, nn.Dropout) and name == "p"))
    ]


def _compare(rule: Rule, module: nn.Module, state: _Class) -> None:
    """Run both codes on all cases.

    Raises:
        Unproven: they differ, or equality would prove nothing.
    """
    twin = _twin(module)
    if (reason := rule.condition(twin)) is not None:
        raise Unproven(reason)
    widths = _widths(rule, twin, state)
    compared = []
    for training, chosen in itertools.product((False, True), _subsets(rule, type(module))):
        with contextlib.suppress(_Impossible):
            if _run(rule, twin.train(training), state, widths, chosen):
                compared.append(chosen)
        # Few rows without a gradient, which linear layers require.
        with contextlib.suppress(_Impossible), torch.no_grad():
            if _run(rule, twin, state, widths, chosen, length=FEW):
                compared.append(chosen)
    if not compared:
        raise Unproven("the fused code computes none of the probe's cases")
    most = compared[-1]
    for place, name in _places(twin):
        setattr(place, name, 1.0)
        with torch.no_grad():
            _run(rule, twin, state, widths, most)
        setattr(place, name, 0.0)
    twin.eval()
    config = getattr(twin, "config", None)
    for owner in (vars(twin), vars(config) if config is not None else {}):
        for flag in [n for n, v in owner.items() if type(v) is bool and n in state.names]:
            if flag != "training":
                owner[flag] = not owner[flag]
                with contextlib.suppress(_Impossible):
                    _run(rule, twin, state, widths, most)
                owner[flag] = not owner[flag]
    with contextlib.suppress(_Impossible):
        _run(rule, twin.half(), state, widths, most)


class _Impossible(Exception):
    """The module's own code raises for a case."""


def _parameters(cls: type, method: str) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(getattr(cls, method)).parameters)
    found.pop("self", None)
    return {n: p for n, p in found.items() if p.kind is not p.VAR_KEYWORD}


def _subsets(rule: Rule, cls: type) -> list[tuple[str, ...]]:
    """Return all sets of the optional arguments of the class, the largest last."""
    names = [
        "past_key_values" if name in CACHES else name
        for name in _parameters(cls, rule.method)
        if name in OPTIONAL or name in CACHES
    ]
    sizes = range(len(names) + 1)
    return [chosen for size in sizes for chosen in itertools.combinations(names, size)]


def _widths(rule: Rule, twin: Any, state: _Class) -> dict[str, int]:
    """Return the sizes of the tensor arguments with which the module's code runs."""
    sizes = dict.fromkeys(s for p in twin.parameters() for s in reversed(p.shape))
    names = list(_parameters(original_class(twin), rule.method))
    free = [n for n in names if n in (names[0], "input_tensor")]
    error: Exception | None = None
    for found in itertools.product(list(sizes) or [8], repeat=len(free)):
        widths = dict(zip(free, found))
        try:
            with state.record.forgetting():
                _call_original(rule, twin, state, _arguments(rule, twin, widths, ()), False)
            return widths
        except Exception as this:
            error = error or this
    raise Unproven(f"its code raises on the probe's inputs: {error}")


def _arguments(
    rule: Rule, twin: Any, widths: dict[str, int], chosen: tuple[str, ...], length: int = LENGTH
) -> dict[str, Any]:
    """Return arguments by name, with those optional ones that are chosen.

    Raises:
        Unproven: the method has an argument that the probe does not know.
    """
    tensor = next(twin.parameters(), torch.empty(0, device="cpu"))
    made: dict[str, Any] = {}
    names = _parameters(original_class(twin), rule.method)
    for i, (name, parameter) in enumerate(names.items()):
        if i == 0 or name == "input_tensor":
            made[name] = _random(tensor.dtype, BATCH, length, widths[name])
        elif name == "position_embeddings":
            made[name] = _tables(twin, length, tensor.dtype)
        elif name == "position_ids":
            made[name] = torch.arange(length, device="cpu")[None]
        elif name in ("attention_mask", "mask"):
            keys = length + CACHED * ("past_key_values" in chosen)
            hidden = _random(tensor.dtype, BATCH, 1, length, keys) > 0.5
            additive = hidden.to(tensor.dtype) * -1e4
            made[name] = additive if "attention_mask" in chosen else None
        elif name == "encoder_hidden_states":
            made[name] = (
                _random(tensor.dtype, BATCH, ENCODED, widths[next(iter(names))])
                if name in chosen
                else None
            )
        elif name in CACHES or name in ("encoder_attention_mask", "use_cache"):
            made[name] = None
        elif name in ("is_causal", "output_attentions"):
            made[name] = False
        elif name not in ("position_bias", "encoder_decoder_position_bias", "attn_mask"):
            raise Unproven(f"its {rule.method} has the argument {name}, which the probe lacks")
        elif parameter.default is parameter.empty:
            made[name] = None
    return made


def _tables(twin: Any, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables of cos and sin for the module's rotary dimensions."""
    dims = next(
        (
            int(getattr(m, name))
            for m in twin.modules()
            for name in ("rotary_ndims", "rotary_dim", "head_dim", "head_size")
            if isinstance(getattr(m, name, None), int)
        ),
        8,
    )
    angles = _random(torch.float32, 1, length, dims // 2) * 3
    both = torch.cat((angles, angles), -1)
    return both.cos().to(dtype), both.sin().to(dtype)


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu").to(dtype)


def _run(
    rule: Rule,
    twin: Any,
    state: _Class,
    widths: dict[str, int],
    chosen: tuple[str, ...],
    length: int = LENGTH,
) -> bool:
    """Compare one case; return whether the fused code computed it.

    Raises:
        Unproven: the results differ.
        _Impossible: the module's own code raises.
    """
    steps = [_arguments(rule, twin, widths, chosen, length)]
    if "past_key_values" in chosen:
        steps.insert(
            0, _arguments(rule, twin, widths, tuple(set(chosen) - {"attention_mask"}), CACHED)
        )
    original = type(twin)
    fused_method = guarded(rule, original, lambda self, *args, **kwargs: NotImplemented)

    def fused(args: dict[str, Any]) -> Any:
        twin.__class__ = rule.subclass(original)
        try:
            return fused_method(twin, **args)
        finally:
            twin.__class__ = original

    failed: Exception | None = None
    try:
        ours = _results(twin, fused, steps, chosen)
    except Exception as error:
        ours, failed = None, error
    compared = ours is not None
    before = copy.deepcopy(state.record.outcomes)
    try:
        expected = _results(
            twin, lambda args: _call_original(rule, twin, state, args, compared), steps, chosen
        )
    except Unproven:
        raise
    except Exception as error:
        if compared or failed:
            state.record.outcomes = before
        raise _Impossible from error
    if failed is not None:
        raise failed
    if ours is None or expected is None:
        return False
    # A gradient that is zero up to rounding has the error of the terms that cancel.
    norms = [
        float(t.detach().double().norm())
        for n, t in expected.items()
        if t is not None and "grad" in n
    ]
    for name in {**expected, **ours}:
        least = max(norms) / 8 if "grad" in name else 0.0
        _agree(name, ours.get(name), expected.get(name), least)
    return True


def _call_original(
    rule: Rule, twin: Any, state: _Class, args: dict[str, Any], compared: bool
) -> Any:
    """Call the observed copy of the module's code."""
    changed = [(m, type(m)) for m in twin.modules() if original_class(m) in state.copies]
    state.record.compared = compared
    try:
        for inner, _ in changed:
            inner.__class__ = state.copies[original_class(inner)]
        return getattr(twin, rule.method)(**args)
    finally:
        for inner, cls in changed:
            inner.__class__ = cls


def _results(
    twin: nn.Module,
    run: Callable[[dict[str, Any]], Any],
    steps: list[dict[str, Any]],
    chosen: tuple[str, ...],
) -> dict[str, torch.Tensor | None] | None:
    """Return outputs, cache and gradients of a run, or None if it returns NotImplemented."""
    cache = _cache(chosen)
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    for step in steps:
        args = {
            n: t.detach().requires_grad_()
            if isinstance(t, torch.Tensor) and t.is_floating_point() and "mask" not in n
            else t
            for n, t in step.items()
        }
        inputs += [t for t in args.values() if isinstance(t, torch.Tensor) and t.requires_grad]
        args |= {n: cache for n in args if n in CACHES}
        out = run(args)
        if out is NotImplemented:
            return None
        outputs += _tensors(out)
    named: dict[str, torch.Tensor | None] = {f"output {i}": t for i, t in enumerate(outputs)}
    generator = torch.Generator().manual_seed(1)  # equal weights of the outputs in both codes
    weighted = [
        (t * torch.randn(t.shape, generator=generator).to(t.dtype)).sum()
        for t in outputs
        if t.requires_grad
    ]
    if not weighted:
        return named
    needs_grad = [*inputs, *twin.parameters()]
    grads = torch.autograd.grad(sum(weighted), needs_grad, allow_unused=True)  # type: ignore[arg-type]
    return named | {f"gradient {i}": g for i, g in enumerate(grads)}


def _cache(chosen: tuple[str, ...]) -> Any:
    if "past_key_values" not in chosen:
        return None
    from transformers import DynamicCache, EncoderDecoderCache

    if "encoder_hidden_states" in chosen:
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    return DynamicCache()


def _tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    parts = out if isinstance(out, (tuple, list)) else ()
    return [t for part in parts for t in _tensors(part)]


def _agree(
    name: str, ours: torch.Tensor | None, expected: torch.Tensor | None, least: float
) -> None:
    if ours is None or expected is None:
        present = ours if expected is None else expected
        if present is not None and bool(present.any()):
            raise Unproven(f"its {name} exists in one code only")
        return
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        raise Unproven(f"its {name} is {ours.dtype} {tuple(ours.shape)} fused")
    eps = torch.finfo(expected.dtype).eps
    off = float((ours.detach().double() - expected.detach().double()).norm())
    if not off <= LIMIT * eps * max(float(expected.detach().double().norm()), least):
        raise Unproven(f"its {name} differs by {off:.1e}")
