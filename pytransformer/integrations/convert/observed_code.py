# SPDX-License-Identifier: Apache-2.0
"""Copies of functions that report what a run does: conditions, calls, slices and large numbers.

A comparison of numbers proves only the code that ran. A copy therefore records the outcome of every
condition, and a run raises :class:`Unproven` at code whose effect may depend on values or lengths
that the inputs lack: a call that is not in the lists below, a slice beyond the end of a dimension,
an integer above 8, a comparison of tensors, a loop or an assignment to anything but a local name.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

# Functions and methods of tensors without thresholds, except an activation's at 0.
SMOOTH = frozenset(
    "cat chunk contiguous dropout expand flatten float gelu layer_norm linear matmul mean mul neg"
    " permute pow reciprocal relu reshape rms_norm rsqrt sigmoid silu size softmax split sqrt"
    " square squeeze sub sum tanh to transpose type_as unflatten unsqueeze view add div addmm"
    " addcmul repeat_interleave finfo".split()
)
BUILTINS = (getattr, hasattr, isinstance, len, tuple, float, int)
# Methods of transformers' objects, called by converted modules too.
METHODS = ("update", "get_interface")
LARGE = 8
ACCEPTED = (
    ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AnnAssign, ast.If,
    ast.Expr, ast.Raise, ast.Pass, ast.expr, ast.expr_context, ast.keyword, ast.operator,
    ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
REFUSED = (
    ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Await, ast.Yield,
    ast.YieldFrom, ast.NamedExpr,
)  # fmt: skip


class Unproven(Exception):
    """A reason why equal numbers would not prove equal code."""


class Record:
    """The outcomes of conditions in all runs, and the functions that the copies may call.

    ``compared`` is False during runs that a converted module leaves to the original code.
    """

    def __init__(self) -> None:
        self.outcomes: dict[bool, set[tuple[str, bool]]] = {True: set(), False: set()}
        self.copies: set[Any] = set()
        self.attention: set[Any] = set()
        self.compared = True

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """Drop the outcomes of the block."""
        before = {compared: set(seen) for compared, seen in self.outcomes.items()}
        try:
            yield
        finally:
            self.outcomes = before

    def refuse(self, reason: str) -> None:
        if self.compared:
            raise Unproven(reason)

    def condition(self, place: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (value.dim() > 0 or value.dtype != torch.bool):
            self.refuse("its code compares tensors")
            return value
        self.outcomes[self.compared].add((place, bool(value)))
        return value

    def call(self, function: Any) -> Any:
        if isinstance(function, functools.partial):
            return functools.partial(self.call(function.func), *function.args, **function.keywords)
        name = getattr(function, "__name__", "")
        owner = getattr(function, "__self__", None)
        file = getattr(function, "__module__", None) or "torch"
        library = isinstance(owner, torch.Tensor) or file.split(".")[0] in ("torch", "math")
        known = (
            isinstance(function, nn.Module)
            or function in self.copies
            or getattr(function, "__func__", None) in self.copies
            or function in self.attention
            or function in BUILTINS
            or (library and name in SMOOTH)
            or (name in METHODS and type(owner).__module__.startswith("transformers."))
        )
        if not known:
            self.refuse(f"its code calls {name or type(function).__name__}")
        if name == "get_interface":
            return lambda *args: self._interface(function, *args)
        return function

    def _interface(self, get: Callable[..., Any], *args: Any) -> Any:
        found = get(*args)
        self.attention.add(found)
        return found

    def element(self, value: Any, index: Any) -> Any:
        if isinstance(value, torch.Tensor):
            parts = index if isinstance(index, tuple) else (index,)
            if not all(isinstance(p, (int, slice, type(Ellipsis))) for p in parts):
                self.refuse("its code indexes by a tensor or None")
            else:
                # Dimensions after an ellipsis count from the last one.
                front = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
                sizes = value.shape
                at = [*sizes[:front], 0, *sizes[len(sizes) - len(parts) + front + 1 :]]
                for size, part in zip(at, parts):
                    bounds = (part.start, part.stop) if isinstance(part, slice) else ()
                    if any(b is not None and abs(b) > size for b in bounds):
                        self.refuse("its code slices beyond the end of a dimension")
        return value[index]

    def number(self, value: int) -> int:
        self.refuse(f"its code has the number {value}")
        return value

    def one_sided(self, conditions: Iterable[str]) -> list[str]:
        """Return the conditions that had one outcome in all compared runs.

        A condition may lack an outcome that always leads to the original code.
        """
        found = []
        for place in conditions:
            compared = {value for at, value in self.outcomes[True] if at == place}
            aside = {value for at, value in self.outcomes[False] if at == place}
            if compared and len(compared | aside) < 2:
                found.append(place)
        return found


class _Rewrite(ast.NodeTransformer):
    """Wrap conditions, calls, subscripts and large integers in calls of the record."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.conditions: dict[str, str] = {}  # place to source text

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, (*ACCEPTED, ast.Slice)) or isinstance(node, REFUSED):
            raise Unproven(f"its code has a {type(node).__name__}")
        return super().generic_visit(node)

    def _ask(self, method: str, *args: ast.expr) -> ast.Call:
        record = ast.Attribute(ast.Name("_record", ast.Load()), method, ast.Load())
        return ast.Call(record, list(args), [])

    def _condition(self, node: ast.expr) -> ast.expr:
        text = ast.unparse(node)
        if isinstance(node, ast.BoolOp):
            node.values = [self._condition(value) for value in node.values]
            return node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self._condition(node.operand)
            return node
        place = f"{self.function} {len(self.conditions)}"
        self.conditions[place] = text
        compares = isinstance(node, ast.Compare)
        inner: Any = super().generic_visit(node) if compares else self.visit(node)
        return self._ask("condition", ast.Constant(place), inner)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        return self._condition(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        return self._condition(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        return self._condition(node) if isinstance(node.op, ast.Not) else self.generic_visit(node)

    def _branch(self, node: Any) -> ast.AST:
        test = self._condition(node.test)
        node.test = ast.Constant(True)
        self.generic_visit(node)
        node.test = test
        return node

    visit_If = visit_IfExp = _branch

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.func = self._ask("call", node.func)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not isinstance(node.ctx, ast.Load):
            raise Unproven("its code assigns to an element")
        self.generic_visit(node)
        index = node.slice
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        made: list[ast.expr] = []
        for part in parts:
            if isinstance(part, ast.Slice):
                none = ast.Constant(None)
                bounds = [part.lower or none, part.upper or none, part.step or none]
                made.append(ast.Call(ast.Name("slice", ast.Load()), bounds, []))
            else:
                made.append(part)
        whole = ast.Tuple(made, ast.Load()) if isinstance(index, ast.Tuple) else made[0]
        return self._ask("element", node.value, whole)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        large = type(node.value) is int and abs(node.value) > LARGE
        return self._ask("number", node) if large else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        for target in node.targets:
            names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            if not all(isinstance(name, ast.Name) for name in names):
                raise Unproven("its code assigns to an attribute or an element")
        return self.generic_visit(node)


def copied(
    function: Any, record: Record, namespaces: dict[int, dict[str, Any]]
) -> tuple[Any, dict[str, str]]:
    """Return a copy of the function that reports to the record, and its conditions by place.

    Copies of functions of one file share a copy of the file's names, so one copy calls another.

    Raises:
        Unproven: its source is absent, or has a statement that is not supported.
    """
    if function.__closure__:
        raise Unproven("its code is a closure")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, TypeError, SyntaxError):
        raise Unproven("its source cannot be read") from None
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise Unproven("its code is not a function")
    node.decorator_list, node.returns = [], None
    for arg in ast.walk(node.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    for part in ast.walk(node):
        if isinstance(part, ast.AnnAssign):
            part.annotation = ast.Constant(None)
    if ast.get_docstring(node):
        node.body = node.body[1:] or [ast.Pass()]
    rewrite = _Rewrite(function.__qualname__)
    node.body = [rewrite.visit(statement) for statement in node.body]
    names = namespaces.setdefault(
        id(function.__globals__), {**function.__globals__, "_record": record}
    )
    local: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(tree), f"<{node.name}>", "exec"), names, local)
    record.copies.add(local[node.name])
    return local[node.name], rewrite.conditions
