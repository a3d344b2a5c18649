# SPDX-License-Identifier: Apache-2.0
"""Rules that map Hugging Face's weight names and layouts to our tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ops.options import ActivationName

ACTIVATIONS: dict[str, ActivationName] = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu", "swish": "silu",
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """A rule: our tensor that matches ``ours`` is the concatenation of ``theirs``.

    ``theirs`` are templates with \\1 \\2. With ``transposed`` each source is (in, out), as in
    GPT-2. Shapes that differ only in grouping are reshaped.
    """

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False


def rules(table: Sequence[tuple[Any, ...]]) -> tuple[Rule, ...]:
    """Return rules from rows ``(ours, theirs, ...)``.

    ``*`` in ours is one component of the name, \\1, \\2 ... in theirs.
    """
    made = []
    for ours, *theirs in table:
        pattern = re.escape(ours).replace(r"\*", r"([^.]+)")
        names = tuple(name for name in theirs if name is not TRANSPOSED)
        made.append(Rule(pattern, names, TRANSPOSED in theirs))
    return tuple(made)


TRANSPOSED = object()


@dataclass(frozen=True)
class Conversion:
    """The conversion of one Hugging Face ``model_type``.

    Attributes:
        settings: maps (config, state, architecture) to the fields of our config; raises ValueError
            for unsupported settings.
        rules: the first rule that matches a name and whose sources exist applies.
        prefix: of the trunk inside models with a head; the rules' names omit it.
        ignored: a pattern of redundant source tensors (ties, tables, heads that the architecture
            adds).
        renames: (pattern, replacement) from names of older files to those in the rules.
        shared: names that files omit, and the name that holds the tensor.
    """

    settings: Callable[[dict[str, Any], dict[str, torch.Tensor], str], dict[str, Any]]
    rules: tuple[Rule, ...]
    prefix: str = ""
    ignored: str = "$^"
    renames: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)

    def translate(
        self, wanted: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the source tensors under our names.

        Raises:
            ValueError: one of our tensors has no source, or a source tensor is unused.
        """
        theirs = {self.name(k): v for k, v in state.items()}
        theirs.update(
            {
                k: theirs[other]
                for k, other in self.shared.items()
                if k not in theirs and other in theirs
            }
        )
        used: set[str] = set()
        result = {}
        for name, mine in wanted.items():
            rule, sources = self.source(name, theirs)
            used.update(sources)
            parts = [
                theirs[s].t() if rule.transposed and theirs[s].dim() == 2 else theirs[s]
                for s in sources
            ]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            result[name] = joined.reshape(mine.shape) if joined.numel() == mine.numel() else joined
        if left := [k for k in theirs if k not in used and not re.fullmatch(self.ignored, k)]:
            raise ValueError(
                "the Hugging Face model has weights with no place here:"
                f" {', '.join(sorted(left)[:6])}"
            )
        return result

    def source(self, name: str, theirs: Mapping[str, torch.Tensor]) -> tuple[Rule, list[str]]:
        """Return the rule for our tensor of this name and the names of its sources."""
        missing: list[str] = []
        for rule in self.rules:
            if match := re.fullmatch(rule.ours, name):
                sources = [match.expand(template) for template in rule.theirs]
                if all(s in theirs for s in sources):
                    return rule, sources
                missing += [s for s in sources if s not in theirs]
        reason = (
            f"should come from {', '.join(missing)}, not in the Hugging Face model"
            if missing
            else "has no rule"
        )
        raise ValueError(f"{name} {reason}")

    def name(self, theirs: str) -> str:
        theirs = theirs.removeprefix(self.prefix)
        for pattern, replacement in self.renames:
            theirs = re.sub(pattern, replacement, theirs)
        return theirs


def activation(name: str) -> ActivationName:
    """Return our name of a Hugging Face activation."""
    if name not in ACTIVATIONS:
        raise ValueError(
            f"the activation {name!r} has no fused feed-forward here; there are"
            f" {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def demand(config: dict[str, Any], **wanted: Any) -> None:
    """Raise ValueError unless these settings are absent or have these values."""
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise ValueError(
                f"the Hugging Face setting {key}={config[key]!r} has no counterpart here, only"
                f" {value!r}"
            )
