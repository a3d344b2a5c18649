# SPDX-License-Identifier: Apache-2.0
"""``convert(model)`` runs norms, feed-forward networks and attention of a model on our ops.

It changes a module's class to a generated subclass whose ``forward`` calls our ops. Parameters,
buffers, hooks, names and the state dict are untouched, ``isinstance`` still holds, and
:func:`revert` restores the class.

A module is converted if its class is exactly one listed in :mod:`.rules`, its ``forward`` has the
code that the rule was written for or passes :mod:`.probe`, and our op supports its settings.
Subclasses and other classes of the same name are not converted. The report lists every candidate
that was not converted, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ... import _html
from . import (  # noqa: F401  # they fill RULES
    code,
    hugging_face_rules,
    long_rules,
    padding_rules,
    pre_norm_rules,
    probe,
    rotary_rules,
    t5_rules,
    timm_rules,
    torch_rules,
)
from .modules import unknown_bypassed
from .rules import KINDS, ON_REQUEST, Converted, candidate, find_rule

__all__ = ["Conversion", "convert", "revert"]


@dataclass(frozen=True)
class Conversion:
    """The result of :func:`convert`.

    ``converted`` has (name, class, op) and ``skipped`` has (name, class, reason).
    """

    model: torch.nn.Module
    converted: list[tuple[str, str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)

    def revert(self) -> None:
        """Restore the original class of every module."""
        revert(self.model)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            "convert: the result is a report, not a model; convert(model) works in place, so call"
            " the model itself"
        )

    def __str__(self) -> str:
        lines = [self._title]
        for title, rows in (("", self.converted), ("not converted: ", self.skipped)):
            lines += [
                f"  {title}{count} x {of} (as {example}): {what}"
                for count, of, example, what in _counted(rows)
            ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        columns = ("modules", "class", "first", "op, or why not")
        rows = [*_counted(self.converted), *_counted(self.skipped)]
        return _html.table(columns, rows, columns[:1], caption=self._title)

    @property
    def _title(self) -> str:
        return (
            f"converted {len(self.converted)} modules, left {len(self.skipped)} that looked like"
            " candidates"
        )


def _counted(rows: Iterable[tuple[str, str, str]]) -> list[tuple[int, str, str, str]]:
    """Return (count, class, first module, op or reason) of each class and op or reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, of, what in rows:
        groups.setdefault((of, what), []).append(name)
    return [
        (len(names), of, names[0] or "the model itself", what)
        for (of, what), names in groups.items()
    ]


def convert(model: torch.nn.Module, *, kinds: Iterable[str] = KINDS) -> Conversion:
    """Run the supported modules of ``model`` on our ops, in place.

    Args:
        model: a built model of torch.nn or Hugging Face modules, on any device, in any dtype.
        kinds: any of ``"norm"``, ``"feed_forward"``, ``"attention"``, ``"block"`` (residual
            connection, dropout and norm in one op) and ``"linear"`` (linear layers on the CPU).
            ``"padding"``, off by default, makes encoders such as BERT's skip padding at the end of
            sequences on the CPU; hidden states there become zeros.

    Returns:
        A :class:`Conversion`; ``print`` shows it.

    Raises:
        TypeError: model is not a module.
        ValueError: unknown kind.

    Convert after the model is built, moved and quantized, and before torch.compile. Dropout keeps
    its probability but draws its mask from our generator, which torch's seeds. Hugging Face's
    attention uses :func:`pytransformer.integrations.transformers.register`. This function converts
    T5's attention, to pass its bias table to the kernel, and the rotary embedding of models such as
    Llama.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"convert: model must be a torch.nn.Module, got {type(model).__name__}")
    wanted = tuple(kinds)
    if unknown := [k for k in wanted if k not in (*KINDS, *ON_REQUEST)]:
        raise ValueError(
            f"convert: unknown kind {unknown[0]!r}; the kinds are"
            f" {', '.join((*KINDS, *ON_REQUEST))}"
        )
    result, refused = Conversion(model), _probe_unknown(model)
    for name, module in model.named_modules():
        if isinstance(module, Converted):
            continue
        of = type(module).__name__
        rule = find_rule(type(module))
        if rule is None:
            if (reason := candidate(module)) is not None:
                result.skipped.append((name, of, reason))
            continue
        if rule.kind not in wanted:
            continue
        cls = type(module)
        if (reason := rule.why_not(module)) is not None:
            difference = refused.get(cls)
            result.skipped.append((name, of, f"{reason}; {difference}" if difference else reason))
            continue
        module.__class__ = rule.subclass(cls)
        result.converted.append((name, of, f"{rule.what}{' (by probe)' * (cls in refused)}"))
    return result


def _probe_unknown(model: torch.nn.Module) -> dict[type, str | None]:
    """Probe the classes with an unknown digest, theirs or a bypassed class's, and return why not.

    Inner modules come first, because a block reads whether it may bypass them.
    """
    found: dict[type, str | None] = {}
    known: dict[type, bool] = {}
    for module in reversed(list(model.modules())):
        cls = type(module)
        rule = None if isinstance(module, Converted) else find_rule(cls)
        if rule is None or not rule.by_probe:
            continue
        if cls not in known:
            known[cls] = (rule.known(cls) and not unknown_bypassed(module)) or not code.is_own(
                cls, rule.method
            )
        if not known[cls]:
            found[cls] = probe.why_not(rule, module)
    return found


def revert(model: torch.nn.Module) -> int:
    """Restore the class of the modules that :func:`convert` changed, and return their number."""
    changed = [m for m in model.modules() if isinstance(m, Converted)]
    for module in changed:
        module.__class__ = _reverted(type(module))
        for name in [name for name in vars(module) if name.startswith("_pytransformer_")]:
            del vars(module)[name]
    return len(changed)


def _reverted(cls: type) -> Any:
    """Return the class without its conversion.

    Parametrizations and FSDP derive a class from a converted one; it is derived anew.
    """
    if not issubclass(cls, Converted):
        return cls
    if "converted_from" in vars(cls):
        return cls.converted_from
    names = {n: v for n, v in vars(cls).items() if n not in ("__dict__", "__weakref__")}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, tuple(_reverted(base) for base in cls.__bases__), names)
