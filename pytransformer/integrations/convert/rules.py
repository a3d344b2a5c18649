# SPDX-License-Identifier: Apache-2.0
"""Which classes are converted, how, and on what condition."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from . import code

KINDS = ("norm", "feed_forward", "attention", "block", "linear")
ON_REQUEST = ("padding",)  # what changes results that nobody should read


class Converted:
    """Base of every converted module's class; ``converted_from`` is the class it had."""

    converted_from: ClassVar[type]
    cache_keyword: ClassVar[str]  # the name of the original method's cache argument

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled and copied as what it is: the class is made anew from the one it came from."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, arguments, *rest = reduced
        assert arguments[0] is type(self), "torch.nn.Module changed how it is pickled"
        return (_rebuild, (type(self).converted_from,), *rest)


def _rebuild(original: type[torch.nn.Module]) -> torch.nn.Module:
    rule = find_rule(original)
    cls = original if rule is None or not rule.checked(original) else rule.subclass(original)
    return torch.nn.Module.__new__(cls)


@dataclass(frozen=True)
class Rule:
    """How modules of one class are converted.

    ``mixin`` goes before the class and overrides ``method``, which may return NotImplemented to run the original.
    ``condition(module)`` returns why the module may not be fused as it is now, or None. It is evaluated at conversion and again
    at each call, because hooks, adapters and other weights may come later; the original method runs while there is a reason.
    ``digests`` are those of the original's ``method``, with all that it reaches (see :func:`.code.digest`), that the rule was
    written against (empty: torch's own, whose meaning is documented).
    """

    kind: str
    what: str
    mixin: type
    condition: Callable[[Any], str | None] = lambda module: None
    digests: tuple[str, ...] = ()
    method: str = "forward"

    def __post_init__(self) -> None:
        if hasattr(self.mixin, "forward") and self.method != "forward":
            raise TypeError(
                f"{self.mixin.__name__} overrides forward, so the rule's method must be forward, got {self.method}"
            )

    def why_not(self, module: torch.nn.Module) -> str | None:
        if not self.checked(type(module)):
            return f"its {self.method}, or what that calls, is not one we have checked: changed, or of another {library(type(module))}"
        return why_replaced(module) or self.condition(module)

    def checked(self, cls: type) -> bool:
        """Whether the class has the code the rule was written against."""
        return code.digest(cls, self.method) in self.digests if self.digests else code.is_own(cls, self.method)

    def subclass(self, original: type) -> type:
        return _subclass(self, original)


def library(cls: type) -> str:
    """Return the name of the library that the class comes from."""
    return cls.__module__.split(".")[0]


def original_class(module: torch.nn.Module) -> type:
    """Return the class that the module had before it was converted. A subclass that came later, by a parametrization, is another."""
    cls = type(module)
    base: type = getattr(cls, "converted_from", cls)
    return base if cls.__name__ == base.__name__ else cls


def why_replaced(module: torch.nn.Module) -> str | None:
    """Return why another class would not change what a call of the module runs, or None."""
    return "has a forward of its own, set on the instance" if "forward" in module.__dict__ else None


@functools.cache
def _subclass(rule: Rule, original: type) -> type:
    names: dict[str, Any] = {"converted_from": original, "__module__": original.__module__}
    if hasattr(rule.mixin, rule.method):
        parameters = [n for n in inspect.signature(getattr(original, rule.method)).parameters if n != "self"]
        names["cache_keyword"] = "cache" if "cache" in parameters else "past_key_values"
        names[rule.method] = _guarded(rule, original, tuple(parameters), names["cache_keyword"])
    # The name stays, so that printing the model and code that looks at the name see what they knew.
    cls = type(original.__name__, (rule.mixin, Converted, original), names)
    if "forward" in vars(cls) and "forward" not in names:
        # transformers' layers keep in each subclass the forward of now; one that replaces the original's later would be ignored.
        del cls.forward  # type: ignore[attr-defined]
    return cls


def _guarded(rule: Rule, original: type, parameters: tuple[str, ...], cache_keyword: str) -> Callable[..., Any]:
    """Return the converted class's method: the mixin's where the condition holds, else the original's."""
    name, condition = rule.method, rule.condition
    own, plain, bypassed = getattr(original, name), getattr(rule.mixin, name), code.reached(original, name)
    accepted = inspect.signature(plain).parameters
    by_name = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    renamed = cache_keyword if cache_keyword != "past_key_values" and "past_key_values" in accepted else None

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        for owner, called, function in bypassed:
            if getattr(owner, called) is not function:
                return getattr(original, name)(self, *args, **kwargs)
        if condition(self) is not None:
            return getattr(original, name)(self, *args, **kwargs)
        if by_name or renamed:  # the mixin passes arguments on: by name, since positions differ between modules
            first, named = args[:1], {**dict(zip(parameters[1:], args[1:])), **kwargs}
            if renamed and renamed in named:
                named["past_key_values"] = named.pop(renamed)
            found = plain(self, *first, **named)
        else:
            found = plain(self, *args, **kwargs)
        return own(self, *args, **kwargs) if found is NotImplemented else found

    return functools.wraps(own)(method)


def update_cache(module: Any, cache: Any, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    """Return ``cache.update(...)``, which since transformers 5.24 also takes the keywords of the call, for paged caches."""
    more = {"kwargs": kwargs} if module.cache_keyword == "cache" else {}
    return cache.update(key, value, module.layer_idx, **more)


# By class, or by its full name where the library need not be there. Each module of rules adds its own when this package is imported.
RULES: dict[type | str, Rule] = {}


def find_rule(cls: type) -> Rule | None:
    """The rule for exactly this class, or None."""
    return RULES.get(cls) or RULES.get(f"{cls.__module__}.{cls.__qualname__}")


# Words in a class's name that make a module worth a line in the report. Names never decide what is converted.
_LOOKS_LIKE = {"layernorm": "norm", "rmsnorm": "norm", "mlp": "feed-forward network", "densere": "feed-forward network"}


def candidate(module: torch.nn.Module) -> str | None:
    """Why a module that looks like one of ours has no rule, or None if it does not look like one."""
    name = type(module).__name__.lower()
    for word, what in _LOOKS_LIKE.items():
        if word in name:
            return f"looks like a {what}, but its class is not one that convert knows"
    if name.endswith("attention") and hasattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb"):
        return "its file turns queries and keys by position, but its class is not one that convert knows"
    return None
