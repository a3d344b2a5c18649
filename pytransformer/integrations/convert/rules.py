# SPDX-License-Identifier: Apache-2.0
"""Conversion rules: the converted classes, their replacement methods and conditions."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.modules import module as torch_modules

from ...ops._core import fast_path
from . import code

KINDS = ("norm", "feed_forward", "attention", "block", "linear")
ON_REQUEST = ("padding",)  # kinds that change results at padding, which should not be read
_QUICKLY_CHECKED = ("norm", "linear", "padding")  # kinds whose conditions cost less than a state
_GLOBAL_HOOKS = tuple(
    found for name, found in vars(torch_modules).items()
    if name.startswith("_global_") and isinstance(found, dict)
)  # fmt: skip


class Converted:
    """Base of every converted module's class; ``converted_from`` is its original class."""

    converted_from: ClassVar[type]
    cache_keyword: ClassVar[str]  # the name of the original method's cache argument

    @property
    def qconfig(self) -> Any:
        """The setting of torch.ao.quantization, which selects modules by their exact class."""
        if "qconfig" in vars(self):
            return vars(self)["qconfig"]
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        vars(self)["qconfig"] = value
        if value is None and self.converted_from is torch.nn.Linear:
            warnings.warn(
                "convert: torch.ao.quantization skips a converted Linear, because it compares exact"
                " classes; quantize before convert, or call pytransformer.integrations.revert"
                " first",
                stacklevel=2,
            )

    @qconfig.deleter
    def qconfig(self) -> None:
        del vars(self)["qconfig"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by rebuilding the class from the original one."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, arguments, *rest = reduced
        assert arguments[0] is type(self), "torch.nn.Module changed how it is pickled"
        return (_rebuild, (type(self).converted_from,), *rest)


def _rebuild(original: type[torch.nn.Module]) -> torch.nn.Module:
    rule = find_rule(original)
    cls = original if rule is None or not rule.checked(original) else rule.subclass(original)
    return torch.nn.Module.__new__(cls)


def _unconditional(module: torch.nn.Module) -> None:
    """Let a rule always apply."""


@dataclass(frozen=True)
class Rule:
    """The conversion of modules of one class.

    ``mixin`` precedes the class in the MRO and overrides ``method``, which may return
    NotImplemented to run the original. ``condition(module)`` returns why the module cannot be fused
    now, or None. It is evaluated at conversion and at each call, because hooks, adapters and new
    weights may be added later. While there is a reason, the original method runs. ``digests`` are
    the digests of the original ``method`` with its callees (see :func:`.code.digest`) that the rule
    was written for. They are empty for torch, whose behavior is documented. The probe
    (:mod:`.probe`) decides about other code.
    """

    kind: str
    what: str
    mixin: type
    condition: Callable[[Any], str | None] = _unconditional
    digests: tuple[str, ...] = ()
    method: str = "forward"
    by_probe: bool = True  # False: the probe cannot compare the mixin with the original method
    newer: Rule | None = None  # for code without one of the digests, as in a later release
    also: tuple[Rule, ...] = ()  # rules of other methods of the class, by their digests alone
    # Reads what the mixin's method needs of the module and its inner modules: its argument
    # ``facts``, remembered with the condition's result. It must depend on what State compares.
    facts: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        if hasattr(self.mixin, "forward") and self.method != "forward":
            raise TypeError(
                f"{self.mixin.__name__} overrides forward, so the rule's method must be forward,"
                f" got {self.method}"
            )

    def why_not(self, module: torch.nn.Module) -> str | None:
        if not self.checked(type(module)):
            return (
                f"its {self.method}, or what that calls, is not one we have checked: changed, or of"
                f" another {library(type(module))}"
            )
        return why_replaced(module) or self.condition(module)

    def checked(self, cls: type) -> bool:
        """Return whether the rule was written for the class's code, or the probe accepted it."""
        if not self.digests:
            return code.is_own(cls, self.method)
        return self.known(cls) or code.accepted(cls, self.method)

    def known(self, cls: type) -> bool:
        """Return whether the code has one of the rule's digests, or the rule has none."""
        return not self.digests or code.digest(cls, self.method) in self.digests

    def subclass(self, original: type) -> type:
        return _subclass(self, original)


def library(cls: type) -> str:
    """Return the name of the library that defines the class."""
    return cls.__module__.split(".")[0]


def original_class(module: torch.nn.Module) -> type:
    """Return the class of the module before its conversion.

    A subclass that was added later, by a parametrization, is returned instead.
    """
    cls = type(module)
    base: type = getattr(cls, "converted_from", cls)
    return base if cls.__name__ == base.__name__ else cls


def why_replaced(module: torch.nn.Module) -> str | None:
    """Return why a new class would not change what a call of the module runs, or None."""
    return "has a forward of its own, set on the instance" if "forward" in module.__dict__ else None


@functools.cache
def _subclass(rule: Rule, original: type) -> type:
    names: dict[str, Any] = {"converted_from": original, "__module__": original.__module__}
    for one in (rule, *rule.also):
        if not hasattr(one.mixin, one.method) or not (one is rule or one.checked(original)):
            continue
        names[one.method] = guarded(one, original)
        if one.method == "forward":
            renamed = "cache" in _parameters(one, original)
            names["cache_keyword"] = "cache" if renamed else "past_key_values"
    # Keep the name for printing and for code that checks class names.
    cls = type(original.__name__, (rule.mixin, Converted, original), names)
    if "forward" in vars(cls) and "forward" not in names:
        # transformers' layers copy the current forward into each subclass, which would hide later
        # patches of the original's.
        del cls.forward  # type: ignore[attr-defined]
    return cls


def _parameters(rule: Rule, original: type) -> list[str]:
    names = inspect.signature(getattr(original, rule.method)).parameters
    return [name for name in names if name != "self"]


def guarded(
    rule: Rule, original: type, otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return the converted method: the mixin's if the condition holds, else the original's.

    ``otherwise`` replaces the original if the mixin returns NotImplemented.
    """
    name, parameters = rule.method, _parameters(rule, original)
    own, plain, bypassed = (
        getattr(original, name),
        getattr(rule.mixin, name),
        code.reached(original, name),
    )
    otherwise = otherwise or own
    accepted = list(inspect.signature(plain).parameters.values())
    by_name = any(p.kind is p.VAR_KEYWORD for p in accepted)
    names = {parameters[0]: accepted[1].name, "cache": "past_key_values"}
    known = {p.name for p in accepted}
    renamed = {
        old: new for old, new in names.items() if old != new and new in known and old in parameters
    }

    holds = _checked(rule, bypassed)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (facts := holds(self)):
            return getattr(original, name)(self, *args, **kwargs)
        more = {} if rule.facts is None else {"facts": facts}
        # The mixin forwards arguments by name, because positions differ between modules.
        if by_name or (renamed and kwargs):
            first = args[:1] if by_name else args
            named = {**dict(zip(parameters[1:], args[1:])), **kwargs} if by_name else dict(kwargs)
            for old, new in renamed.items():
                if old in named:
                    named[new] = named.pop(old)
            found = plain(self, *first, **more, **named)
        else:
            found = plain(self, *args, **more, **kwargs)
        return otherwise(self, *args, **kwargs) if found is NotImplemented else found

    return functools.wraps(own)(method)


def _checked(rule: Rule, bypassed: tuple[code.Reached, ...]) -> Callable[[Any], Any]:
    """Return the check of a module at each call: the condition, and no bypassed function replaced.

    The check returns False, or the rule's facts, or True if it has none.

    The fast path remembers the result in the module's dictionary. It compares what the result
    depends on: the dictionaries of all inner modules (hooks, settings, types of weights), their
    classes' forwards and the bypassed functions.
    """
    key = f"_pytransformer_{rule.method}"
    quick = rule.condition is _unconditional or rule.kind in _QUICKLY_CHECKED

    def holds(self: Any) -> Any:
        remembers = not quick and not torch.compiler.is_compiling()
        state = self.__dict__.get(key) if remembers else None
        if state is not None:
            result = fast_path.entries.recall(state, self, _GLOBAL_HOOKS)
            if result is not None:
                return result
        if any(getattr(owner, called) is not function for owner, called, function in bypassed):
            return False
        result = rule.condition(self) is None
        if result and rule.facts is not None:
            result = rule.facts(self)
        if remembers and fast_path.why_not() is None:
            self.__dict__.pop(key, None)  # a copied module has None there, which is no State
            self.__dict__[key] = _remembered(self, bypassed, result)
        return result

    return holds


def _remembered(module: torch.nn.Module, bypassed: tuple[code.Reached, ...], result: object) -> Any:
    classes: set[Any] = {cls for m in module.modules() for cls in (type(m), original_class(m))}
    functions = [tuple(place) for place in bypassed]
    functions += [(cls, "forward", cls.forward) for cls in classes]
    return fast_path.entries.remember(module, _GLOBAL_HOOKS, tuple(functions), result)


def update_cache(
    converted: Any,
    layer: int,
    cache: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
) -> Any:
    """Return ``cache.update(...)`` with the call's keywords, for transformers >= 5.24."""
    more = {"kwargs": kwargs} if converted.cache_keyword == "cache" else {}
    return cache.update(key, value, layer, **more)


# Keys are classes, or full names for optional libraries. Each module of rules adds entries on
# import.
RULES: dict[type | str, Rule] = {}


def find_rule(cls: type) -> Rule | None:
    """Return the rule for exactly this class, or None."""
    rule = RULES.get(cls) or RULES.get(f"{cls.__module__}.{cls.__qualname__}")
    return rule if rule is None or rule.newer is None or rule.known(cls) else rule.newer


# Words in class names of candidates for the report. Names never decide what is converted.
_LOOKS_LIKE = {
    "layernorm": "norm",
    "rmsnorm": "norm",
    "mlp": "feed-forward network",
    "densere": "feed-forward network",
}


def candidate(module: torch.nn.Module) -> str | None:
    """Return why a module that resembles a supported one has no rule, else None."""
    name = type(module).__name__.lower()
    for word, what in _LOOKS_LIKE.items():
        if word in name:
            return f"looks like a {what}, but convert does not support its class"
    if name.endswith("attention") and hasattr(
        sys.modules.get(type(module).__module__), "apply_rotary_pos_emb"
    ):
        return (
            "its file rotates queries and keys by position, but convert does not support its class"
        )
    return None
