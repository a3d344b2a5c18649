# SPDX-License-Identifier: Apache-2.0
"""Digests of the code that a converted module bypasses: a method and its callees."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

LIBRARIES = ("torch", "transformers", "timm")  # digests look through their decorators
# A function of another package in a library's file was patched in by a user.
KNOWN = {*LIBRARIES, *sys.stdlib_module_names}
CALLED = ("eager_attention_forward",)  # functions that converted modules call as the originals do
RENAMED = {"cache": "past_key_values", "curr_cache": "curr_past_key_values"}  # by transformers 5.24


class Reached(NamedTuple):
    """A function and the place where a call looks it up."""

    owner: Any  # a class or a module
    name: str
    function: Any  # the result of getattr(owner, name)


class _Source(NamedTuple):
    digest: str  # of the syntax tree; empty if there is no source
    of_self: tuple[str, ...]  # attributes read from self
    of_file: tuple[str, ...]  # other names read


def reached(cls: type, method: str) -> tuple[Reached, ...]:
    """Return the method and, transitively, the methods and functions of its file that it calls."""
    found: list[Reached] = []
    waiting = [Reached(cls, method, getattr(cls, method))]
    while waiting:
        place = waiting.pop()
        if place in found:
            continue
        found.append(place)
        if (function := function_of(place.function)) is not None:
            waiting += _called(cls, function)
    return tuple(found)


def digest(cls: type, method: str) -> str:
    """Return a digest of the method and of its callees; empty if there is no source.

    It hashes the syntax trees without docstrings, comments and line breaks, and is equal on every
    Python version. Arguments that transformers 5.24 renamed have their earlier names.
    """
    places = reached(cls, method)
    functions = [function_of(place.function) for place in places]
    digests = ["" if f is None else _source(f).digest for f in functions]
    if not all(digests):
        return ""
    called = sorted(f"{place.name} {of}" for place, of in zip(places[1:], digests[1:]))
    return (
        hashlib.sha256(f"{digests[0]} {called}".encode()).hexdigest()[:12] if called else digests[0]
    )


def is_own(cls: type, method: str) -> bool:
    """Return whether the method's code is in the files of its class and base classes."""
    files = {c.__module__ for c in cls.__mro__}
    functions = [function_of(place.function) for place in reached(cls, method)]
    return all(f is not None and f.__globals__["__name__"] in files for f in functions)


# By class and method, what the probe accepted although its digest is unknown.
_ACCEPTED: dict[tuple[type, str], tuple[Reached, ...]] = {}


def accept(cls: type, method: str) -> None:
    """Accept the current code of the method and of its callees, which the probe compared."""
    _ACCEPTED[cls, method] = reached(cls, method)


def reject(cls: type, method: str) -> None:
    """Withdraw :func:`accept`."""
    _ACCEPTED.pop((cls, method), None)


def accepted(cls: type, method: str) -> bool:
    """Return whether the probe accepted the current code of the method."""
    return _ACCEPTED.get((cls, method)) == reached(cls, method)


def is_probed(cls: type, method: str) -> bool:
    """Return whether the probe, not a digest, accepted the method."""
    return (cls, method) in _ACCEPTED


def function_of(found: Any) -> Any:
    """Return the function behind a property and the libraries' decorators, or None.

    A user's wrapper is different code, so it stays.
    """
    if isinstance(found, property):
        found = found.fget
    while hasattr(found, "__wrapped__") and _library(found) in LIBRARIES:
        found = found.__wrapped__
    return found if inspect.isfunction(found) else None


def _library(function: Any) -> str:
    """Return the package whose file defines the function.

    A wrapper may copy ``__module__``, but not the globals.
    """
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name.split(".")[0]


def _called(cls: type, function: Any) -> Iterator[Reached]:
    source, file = _source(function), function.__globals__
    for name in source.of_self:
        static = inspect.getattr_static(cls, name, None)
        own = any(name in vars(c) for c in cls.__mro__ if c.__module__ == file["__name__"])
        if own and (inspect.isfunction(static) or isinstance(static, (property, staticmethod))):
            yield Reached(cls, name, getattr(cls, name))
    for name in source.of_file:
        found = file.get(name)
        if not inspect.isfunction(found) or name in CALLED:
            continue
        if found.__module__ == file["__name__"] or _library(found) not in KNOWN:
            yield Reached(sys.modules[file["__name__"]], name, found)


@functools.cache
def _source(function: Callable[..., Any]) -> _Source:
    try:
        # Given the function, it would look through wrappers.
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, TypeError, SyntaxError):  # no file, or a lambda inside other code
        return _Source("", (), ())
    node = tree.body[0]
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _Source("", (), ())
    of_self, of_file = [], []
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Attribute)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
        ):
            of_self.append(part.attr)
        if isinstance(part, ast.Name):
            of_file.append(part.id)
        if getattr(part, "type_params", None) == []:  # since Python 3.12
            del part.type_params  # type: ignore[attr-defined]
        for field in ("id", "arg"):
            if (name := getattr(part, field, None)) in RENAMED:
                setattr(part, field, RENAMED[name])
        if (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and part.func.attr == "update"
        ):
            # See rules.update_cache.
            part.keywords = [k for k in part.keywords if k.arg != "kwargs"]
    body = node.body[1:] if ast.get_docstring(node) else node.body
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    # Python 3.13 omits empty lists from a dump by default.
    options: Any = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    text = f"{names}{[ast.dump(s, **options) for s in body]}"
    return _Source(hashlib.sha256(text.encode()).hexdigest()[:12], tuple(of_self), tuple(of_file))
