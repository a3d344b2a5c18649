# SPDX-License-Identifier: Apache-2.0
"""Which classes are converted, how, and on what condition."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch

KINDS = ("norm", "feed_forward", "attention", "block", "linear")
ON_REQUEST = ("padding",)  # what changes results that nobody should read


class Converted:
    """Base of every converted module's class; ``converted_from`` is the class it had."""

    converted_from: ClassVar[type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled and copied as what it is: the class is made anew from the one it came from."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, arguments, *rest = reduced
        assert arguments[0] is type(self), "torch.nn.Module changed how it is pickled"
        return (_rebuild, (type(self).converted_from,), *rest)


def _rebuild(original: type[torch.nn.Module]) -> torch.nn.Module:
    rule = find_rule(original)
    cls = original if rule is None else rule.subclass(original)
    return torch.nn.Module.__new__(cls)


@dataclass(frozen=True)
class Rule:
    """How modules of one class are converted.

    ``mixin`` goes before the class and overrides its methods; ``condition(module)`` says why a module cannot be converted;
    ``digests`` are those of the ``method`` the rule was written against (empty: torch's own, whose meaning is documented).
    """

    kind: str
    what: str
    mixin: type
    condition: Callable[[Any], str | None] = lambda module: None
    digests: tuple[str, ...] = ()
    method: str = "forward"

    def why_not(self, module: torch.nn.Module) -> str | None:
        if not self.checked(type(module)):
            return f"its {self.method} in this version of {type(module).__module__.split('.')[0]} is not one we have checked"
        return self.condition(module)

    def checked(self, cls: type) -> bool:
        """Whether the class has the code the rule was written against."""
        return not self.digests or digest(cls, self.method) in self.digests

    def subclass(self, original: type) -> type:
        return _subclass(self.mixin, original)


@functools.cache
def _subclass(mixin: type, original: type) -> type:
    # The name stays, so that printing the model and code that looks at the name see what they knew.
    return type(
        original.__name__, (mixin, Converted, original), {"converted_from": original, "__module__": original.__module__}
    )


@functools.cache
def digest(owner: type | ModuleType, function: str = "forward") -> str:
    """A digest of what a method of a class, or a function of a file, does: of its syntax tree, so that comments and line breaks do not
    count."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(owner, function)))))
    node = tree.body[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    body = node.body[1:] if ast.get_docstring(node) else node.body
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return hashlib.sha256(f"{names}{[ast.dump(s) for s in body]}".encode()).hexdigest()[:12]


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
