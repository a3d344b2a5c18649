# SPDX-License-Identifier: Apache-2.0
"""Parameter counts of a model by part and, within a stack of blocks, by kind of sub-layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ..nn.attention import MultiHeadAttention
from ..nn.experts import MixtureOfExperts
from ..nn.feed_forward import FeedForward

# Parts by module name; other modules are their own part.
PARTS = {
    name: part
    for part, names in {
        "embeddings": (
            "embedding",
            "positions",
            "segments",
            "embedding_norm",
            "patches",
            "cls_token",
            "projection",
            "subsampling",
        ),
        "encoder": ("blocks", "encoder_bias"),
        "decoder": ("decoder_bias",),
        "output": ("head", "mlm", "nsp", "boundary", "classifier"),
    }.items()
    for name in names
}


class Count(NamedTuple):
    """The parameters of one kind in one part, summed over `times` modules of that kind."""

    part: str
    kind: str
    parameters: int
    times: int

    def __str__(self) -> str:
        each = (
            f" = {self.times} x {self.parameters // self.times:,}"
            if self.times > 1 and self.parameters % self.times == 0
            else ""
        )
        return f"{self.kind}{each}"


@dataclass(frozen=True)
class ParameterTable:
    """The counts of :meth:`Model.parameter_table`; printing formats the table.

    A tied weight is counted once, at its first module.
    """

    rows: tuple[Count, ...]

    def __iter__(self) -> Iterator[Count]:
        return iter(self.rows)

    @property
    def total(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def parts(self) -> dict[str, int]:
        """Return part to parameters, in the order of the model."""
        return {
            part: sum(r.parameters for r in self.rows if r.part == part)
            for part in dict.fromkeys(r.part for r in self.rows)
        }

    def __str__(self) -> str:
        lines = []
        for part, count in self.parts.items():
            lines.append(f"{part:40}{count:>15,}")
            lines += [f"  {row!s:38}{row.parameters:>15,}" for row in self.rows if row.part == part]
        return "\n".join([*lines, f"{'total':40}{self.total:>15,}"])


def parameter_table(model: nn.Module, parts: dict[str, str]) -> ParameterTable:
    """Return the parameter counts of a model.

    Args:
        parts: part of each module or parameter, by name.
    """
    counts: dict[tuple[str, str], int] = {}
    owners: dict[tuple[str, str], set[str]] = {}
    for name, parameter in model.named_parameters():
        path = name.split(".")
        depth, kind = _kind(model, path)
        key = parts.get(path[0], path[0]), kind
        counts[key] = counts.get(key, 0) + parameter.numel()
        owners.setdefault(key, set()).add(".".join(path[:depth]))
    found = [Count(*key, count, len(owners[key])) for key, count in counts.items()]
    # Group by part, in order of first occurrence.
    order = list(dict.fromkeys(row.part for row in found))
    return ParameterTable(tuple(sorted(found, key=lambda row: order.index(row.part))))


def _kind(model: nn.Module, path: list[str]) -> tuple[int, str]:
    """Return the length of the name prefix that identifies the module, and its kind."""
    if "blocks" not in path:
        return 1, path[0].replace("_", " ") if path[0] not in (
            "encoder",
            "decoder",
        ) else "last norm"
    depth = path.index("blocks") + 2  # includes the block's number
    name = path[depth]
    module = getattr(model.get_submodule(".".join(path[:depth])), name)
    if isinstance(module, MultiHeadAttention):
        return depth, "cross-attention" if module.cross else "self-attention"
    if isinstance(module, (FeedForward, MixtureOfExperts)):
        return depth, "experts" if isinstance(module, MixtureOfExperts) else "feed-forward"
    if "norm" in path[-2] or name.endswith("_residual"):
        return depth, "norms"
    return depth, name.replace("_", " ")
