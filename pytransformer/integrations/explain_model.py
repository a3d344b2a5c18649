# SPDX-License-Identifier: Apache-2.0
"""``pt.explain(model, inputs)``: backends by layer with reasons, and bypassed modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _html
from ..ops._core.dispatch import unasked_reason
from ..ops._core.op import Op
from ..ops._core.registry import observing


@dataclass(frozen=True)
class Call:
    """One op that ran inside a module.

    ``reasons`` has each preferred backend that was not used, and why.
    """

    module: str
    op: str
    backend: str
    reasons: dict[str, str]
    extra_bytes: int


@dataclass(frozen=True)
class ModelExplanation:
    """The result of :func:`explain_model`.

    ``bypassed`` has (module, class, advice) of modules that do not use our ops. ``probed`` has
    (module, class, op) of modules that convert() fused by its probe, because their source is new.
    """

    calls: list[Call] = field(default_factory=list)
    bypassed: list[tuple[str, str, str]] = field(default_factory=list)
    probed: list[tuple[str, str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.calls)} calls of our ops"]
        for (op, backend, reasons), members in _groups(self.calls).items():
            most = max(c.extra_bytes for c in members)
            lines.append(
                f"  {op:22} {backend:10} {len(members)} calls, first in"
                f" {members[0].module or 'the model'}"
            )
            lines.append(f"  {'':22} {'':10} at most {most:,} bytes beyond inputs and outputs")
            lines += [f"  {'':22} {'':10} not {name}: {why}" for name, why in reasons]
        for title, rows in (("by probe", self.probed), ("not ours", self.bypassed)):
            for (of, text), count in Counter((of, text) for _, of, text in rows).items():
                first = next(name for name, cls, _ in rows if cls == of)
                lines.append(f"  {title}: {count} x {of}, first {first}: {text}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        columns = ("op", "backend", "calls", "first in", "bytes beyond inputs and outputs", "not")
        rows = [
            (
                op,
                backend,
                len(members),
                members[0].module or "the model",
                f"{max(c.extra_bytes for c in members):,}",
                "; ".join(f"{name}: {why}" for name, why in reasons),
            )
            for (op, backend, reasons), members in _groups(self.calls).items()
        ]
        title = f"{len(self.calls)} calls of our ops"
        shown = _html.table(columns, rows, (columns[2], columns[4]), caption=title)
        if self.bypassed:
            shown += _html.table(("module", "class", "not ours"), self.bypassed)
        return shown


def _groups(calls: list[Call]) -> dict[Any, list[Call]]:
    groups: dict[Any, list[Call]] = {}
    for call in calls:
        groups.setdefault((call.op, call.backend, tuple(call.reasons.items())), []).append(call)
    return groups


def explain_model(model: torch.nn.Module, *args: Any, **kwargs: Any) -> ModelExplanation:
    """Run the model once, without gradients, and report the ops and backends of each module.

    Args:
        model: any module; its mode is unchanged.
        *args, **kwargs: its inputs; a single mapping is keywords, a single tuple is positional
            arguments.

    Returns:
        A :class:`ModelExplanation`; ``print`` shows it as a table.
    """
    if len(args) == 1 and not kwargs:
        (alone,) = args
        if isinstance(alone, Mapping):
            args, kwargs = (), dict(alone)
        elif isinstance(alone, tuple):
            args = alone
    names = {module: name for name, module in model.named_modules()}
    stack: list[str] = []
    calls: list[Call] = []
    ran: set[str] = set()

    def observe(op: Op, a: Any, chosen: str) -> None:
        before = {}
        for name, backend in op.backends.items():
            if name == chosen:
                break
            before[name] = unasked_reason(op, backend, a, ask=False) or "another one was forced"
        calls.append(
            Call(
                stack[-1] if stack else "",
                op.name,
                chosen,
                before,
                op.backends[chosen].extra_bytes(a),
            )
        )

    def enter(module: torch.nn.Module, inputs: Any) -> None:
        stack.append(names[module])
        ran.add(names[module])

    def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        stack.pop()

    from .convert.modules import observed, unhooked

    observed.update(m for m in names if unhooked(m) is None)
    hooks = [m.register_forward_pre_hook(enter, prepend=True) for m in names]
    hooks += [m.register_forward_hook(leave, always_call=True) for m in names]
    try:
        with torch.no_grad(), observing(observe):
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        observed.clear()
    return ModelExplanation(calls, _bypassed(names, ran, calls), _probed(names))


def _probed(names: dict[torch.nn.Module, str]) -> list[tuple[str, str, str]]:
    from .convert import code
    from .convert.rules import Converted, find_rule

    found = []
    for module, name in names.items():
        cls = module.converted_from if isinstance(module, Converted) else None
        rule = None if cls is None else find_rule(cls)
        if cls is not None and rule is not None and code.is_probed(cls, rule.method):
            found.append((name, cls.__name__, rule.what))
    return found


def _bypassed(
    names: dict[torch.nn.Module, str], ran: set[str], calls: list[Call]
) -> list[tuple[str, str, str]]:
    """Return the modules that resemble ours and ran without calling our ops, even inside."""
    from .convert.rules import Converted, find_rule

    def inside(name: str, ops: str) -> bool:
        return any(
            c.op.startswith(ops)
            and (c.module == name or c.module.startswith(f"{name}.") or not name)
            for c in calls
        )

    found = []
    for module, name in names.items():
        if name not in ran:
            continue
        of = type(module).__name__
        if isinstance(module, Converted):
            converted_by = find_rule(module.converted_from)
            aside = [
                (name, of, f"is converted but runs its original {one.method}: it {reason}")
                for one in (() if converted_by is None else (converted_by, *converted_by.also))
                if one.method in vars(module.__class__)
                and (reason := one.condition(module)) is not None
            ]
            if aside:
                found += aside
                continue
        rule = None if isinstance(module, Converted) else find_rule(type(module))
        innermost = not any("Attention" in type(child).__name__ for child in module.children())
        if "Attention" in of and innermost and not inside(name, "attention"):
            found.append((name, of, _attention_advice(module)))
        elif (
            rule is not None
            and rule.kind in ("norm", "feed_forward")
            and not inside(name, "")
            and rule.why_not(module) is None
        ):
            found.append(
                (name, of, f"pytransformer.integrations.convert(model) would make it {rule.what}")
            )
    return found


def _attention_advice(module: torch.nn.Module) -> str:
    """Return the step that moves the attention of a bypassed module to our ops."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name is not None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from .hugging_face import attention_forward, models

        ours = ALL_ATTENTION_FUNCTIONS.get(name) is attention_forward
        if not ours and models.why_not(type(module).__module__) is None:
            return (
                f"runs attn_implementation={name!r}; call"
                " pytransformer.integrations.transformers.register() and .switch(model)"
            )
    return (
        "computes attention itself: it may ignore attn_implementation; pt.activate() or convert may"
        " reach it"
    )
