# SPDX-License-Identifier: Apache-2.0
"""``pt.explain`` reports the backend of a call, or of each layer of a model."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, overload

import torch

from . import _html
from .integrations.explain_model import ModelExplanation, explain_model
from .ops._core.dispatch import ordered, unasked_reason
from .ops._core.registry import OPS, at_home, forced_backend


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`.

    ``reasons`` maps every backend of the op to None if it supports the problem, else to the reason.
    """

    op: str
    backend: str | None
    reasons: dict[str, str | None]
    extra_bytes: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self._title]
        for name in self.reasons:
            extra = (
                f", {self.extra_bytes[name]:,} bytes beyond inputs and outputs"
                if name in self.extra_bytes
                else ""
            )
            lines.append(f"  {name:10} {self._verdict(name)}{extra}")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def _repr_html_(self) -> str:
        rows = [
            (
                name,
                self._verdict(name),
                f"{extra:,}" if (extra := self.extra_bytes.get(name)) else "",
            )
            for name in self.reasons
        ]
        columns = ("backend", "this call", "bytes beyond inputs and outputs")
        notes = "".join(_html.paragraph(f"note: {note}", note=True) for note in self.notes)
        return _html.table(columns, rows, columns[2:], caption=self._title) + notes

    @property
    def _title(self) -> str:
        return f"{self.op}: {self.backend or 'no backend can do this'}"

    def _verdict(self, name: str) -> str:
        reason = self.reasons[name]
        if name == self.backend:
            return "chosen"
        return "possible" if reason is None else f"no: {reason}"


@overload
def explain(op: str, *args: Any, **kwargs: Any) -> Explanation: ...
@overload
def explain(op: torch.nn.Module, *args: Any, **kwargs: Any) -> ModelExplanation: ...
def explain(op: str | torch.nn.Module, *args: Any, **kwargs: Any) -> Explanation | ModelExplanation:
    """Return which backend a call would use, or the backends of a model's layers.

    An op's call does not run. The result gives the reason for each backend that does not support
    it.

    Args:
        op: name of a public op, for example ``"attention"``, or a model, which runs once without
            gradients.
        *args, **kwargs: arguments of the call, checked as the call checks them, or the model's
            inputs, where a single mapping means keywords.

    Returns:
        An :class:`Explanation` or a
        :class:`pytransformer.integrations.explain_model.ModelExplanation`. ``print`` shows either
        as a table.
    """
    if isinstance(op, torch.nn.Module):
        return explain_model(op, *args, **kwargs)
    if op not in OPS:
        raise ValueError(f"explain: unknown op {op!r}; the ops are {', '.join(OPS)}")
    target = OPS[op]
    try:
        inspect.signature(target.prepare).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{op}: {error}") from None
    a, backend, _ = target.prepare(*args, **kwargs)
    forced = backend or forced_backend(op)
    entries = ordered(target, a, "fwd")
    names = [n for n, kernel in entries if kernel is None or kernel == target.backends[n].kernel(a)]
    reasons = {
        name: target.backends[name].why_not(a)
        if forced
        else unasked_reason(target, target.backends[name], a, ask=False)
        for name in dict.fromkeys(names)
    }
    device = a[0].device.type
    asked = [
        n for n in reasons if (n == forced if forced else n == "reference" or at_home(n, device))
    ]
    possible = [n for n in asked if reasons[n] is None]
    notes = ["gradients of gradients go through the reference, in eager mode"]
    if forced:
        notes.append(f"backend {forced!r} is forced")
    if possible and (note := target.backends[possible[0]].note(a)):
        notes.append(note)
    extra = {
        n: target.backends[n].extra_bytes(a) for n, reason in reasons.items() if reason is None
    }
    return Explanation(op, possible[0] if possible else None, reasons, extra, tuple(notes))
