# SPDX-License-Identifier: Apache-2.0
"""``convert(model)``: the norms, feed-forward networks and attention modules of a built model run on our ops.

A module is converted by giving it another class: a subclass of its own whose ``forward`` calls our ops. Parameters, buffers,
hooks, names and the state dict stay as they are, ``isinstance`` still holds, and :func:`revert` gives the old class back.

Which modules: those whose class is, exactly, one that :mod:`.rules` lists (a subclass of it, or a class of the same name
elsewhere, is left alone), whose ``forward`` has the code that the rule was written against, and whose settings our op knows.
Everything that looks like a candidate and is not converted is reported with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from . import hugging_face_rules, long_rules, padding_rules, rotary_rules, t5_rules, timm_rules, torch_rules  # noqa: F401  # which add to RULES
from .rules import KINDS, ON_REQUEST, Converted, candidate, find_rule

__all__ = ["Conversion", "convert", "revert"]


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did: ``converted`` has (name, class, what it became), ``skipped`` has (name, class, reason)."""

    model: torch.nn.Module
    converted: list[tuple[str, str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)

    def revert(self) -> None:
        """Give every module of the model its own class back."""
        revert(self.model)

    def __str__(self) -> str:
        lines = [f"converted {len(self.converted)} modules, left {len(self.skipped)} that looked like candidates"]
        for title, rows in (("", self.converted), ("not converted: ", self.skipped)):
            for (of, what), count in Counter((of, what) for _, of, what in rows).items():
                example = next(name for name, *rest in rows if rest == [of, what])
                lines.append(f"  {title}{count} x {of} (as {example or 'the model itself'}): {what}")
        return "\n".join(lines)


def convert(model: torch.nn.Module, *, kinds: Iterable[str] = KINDS) -> Conversion:
    """Let the modules of ``model`` that we know run on our ops, in place.

    Args:
        model: a built model of torch.nn modules or of Hugging Face transformers; on any device, in any dtype.
        kinds: which of ``"norm"``, ``"feed_forward"``, ``"attention"``, ``"block"`` (residual connection, dropout and norm
            in one op) and ``"linear"`` (products of few rows on the CPU) to convert; ``"padding"``, which is not among those
            converted by default, makes the encoders of BERT and its kin leave out padding at the end of sequences on the CPU:
            hidden states there become zeros.

    Returns:
        A :class:`Conversion`; ``print`` shows it.

    Raises:
        TypeError, ValueError: model is no module; an unknown kind.

    Convert after the model is built, moved and quantized, and before torch.compile. Dropout keeps its probability but draws its
    mask from our generator, seeded by torch's. Hugging Face's attention goes through
    :func:`pytransformer.integrations.transformers.register`; what is converted here is T5's, so that its table of biases reaches
    the kernel, and the turning of queries and keys by position in Llama's and its kin.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"convert: model must be a torch.nn.Module, got {type(model).__name__}")
    wanted = tuple(kinds)
    if unknown := [k for k in wanted if k not in (*KINDS, *ON_REQUEST)]:
        raise ValueError(f"convert: unknown kind {unknown[0]!r}; the kinds are {', '.join((*KINDS, *ON_REQUEST))}")
    result = Conversion(model)
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
        if (reason := rule.why_not(module)) is not None:
            result.skipped.append((name, of, reason))
            continue
        module.__class__ = rule.subclass(type(module))
        result.converted.append((name, of, rule.what))
    return result


def revert(model: torch.nn.Module) -> int:
    """Give the modules that :func:`convert` changed their own class back; returns how many."""
    changed = [m for m in model.modules() if isinstance(m, Converted)]
    for module in changed:
        module.__class__ = type(module).converted_from
    return len(changed)
