# SPDX-License-Identifier: Apache-2.0
"""Tests one model type: outputs, gradients and tokens of ours and sdpa against eager code.

A cell is one comparison. "same" means agreement. "as sdpa" means that eager code and sdpa may
differ and ours agrees with sdpa. "refused: " precedes the reason, "differs: " the difference, and
"fails: " an error of other code. "–" means that eager code itself does not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import pytransformer as pt
from pytransformer.ops._core.registry import trace
from support.hugging_face import (
    conditioned_limit,
    distance,
    flat,
    model_distance_limit,
)

from . import inputs as make
from .inputs import Inputs
from .subjects import MOST_PARAMETERS, Subject, subjects
from .watch import BY_ITSELF, watch

OURS = "pytransformer"
LIMIT = model_distance_limit(torch.float32)
TOKENS = 5
SAME, AS_SDPA, NOTHING = "same", "as sdpa", "–"
NOT_OUTPUTS = ("past_key_values", "cache", "attentions", "mems")
Cells = dict[str, str]
Noise = Callable[[], dict[str, float]]


@dataclass
class Outcome:
    """A model's outputs or the error it raised, and how its attention ran."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    error: Exception | None = None
    ours: int = 0
    reference: int = 0
    left: tuple[str, ...] = ()


# ---- running a model


def leaves(output: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating tensors of an output, by path."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.numel():
            yield name, output
    elif hasattr(output, "items"):
        for key, value in output.items():
            if not any(str(key).endswith(word) for word in NOT_OUTPUTS):
                yield from leaves(value, f"{name}.{key}".lstrip("."))
    elif isinstance(output, (list, tuple)):
        for i, value in enumerate(output):
            yield from leaves(value, f"{name}.{i}")


def real(tensor: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return the part of an output outside padding."""
    for name in ("attention_mask", "decoder_attention_mask", "padding_mask"):
        mask = inputs.get(name)
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            continue
        if tensor.shape[:2] == mask.shape:
            return tensor[mask.bool()]
        # A class token before or after: real under both readings.
        if tensor.shape[:2] == (mask.shape[0], mask.shape[1] + 1):
            before, after = (
                torch.nn.functional.pad(mask, pad, value=1).bool() for pad in ((1, 0), (0, 1))
            )
            return tensor[before & after]
        if tensor.shape[0] == mask.numel():
            return tensor[mask.flatten().bool()]
    return tensor


def loss(outputs: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Return one number in which every output has equal weight, without infinities."""
    parts = []
    for output in outputs.values():
        if output.requires_grad and output.numel():
            weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
            parts.append(
                (torch.where(output.isfinite(), output, 0.0) * weights).sum()
                / output.numel() ** 0.5
            )
    return torch.stack(parts).sum() if parts else None


def run(model: Any, inputs: Inputs, by_itself: frozenset[Any] = BY_ITSELF) -> Outcome:
    """Return outputs at real positions, all gradients, and the modules that called `by_itself`."""
    found = Outcome()
    model.zero_grad()
    torch.manual_seed(0)
    with trace() as ran, watch(by_itself) as seen:
        try:
            outputs = {name: real(t, inputs) for name, t in leaves(model(**inputs))}
            if (total := loss(outputs)) is not None:
                total.backward()
        except Exception as error:
            found.error = error
            return found
    found.outputs = {name: t.detach() for name, t in outputs.items()}
    found.grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found.ours = sum(op.startswith("attention") and op.endswith("fwd") for op, _ in ran)
    found.reference = sum(
        op.startswith("attention") and backend == "reference" for op, backend in ran
    )
    found.left = tuple(sorted(seen))
    return found


def generated(model: Any, inputs: Inputs) -> Outcome:
    """Return the logits of every greedy step; tokens alone would hide small changes."""
    prompt = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    found = Outcome()
    torch.manual_seed(0)
    with trace() as ran, watch() as seen, torch.no_grad():
        try:
            made = model.generate(
                **prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
                num_beams=1,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            found.outputs = {str(i): t for i, t in enumerate(made.logits)}
        except Exception as error:
            found.error = error
    found.ours = sum(op.startswith("attention") and op.endswith("fwd") for op, _ in ran)
    found.left = tuple(sorted(seen))
    return found


# ---- checking the results


def off(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    """Return relative 2-norm differences of outputs and gradients; infinite for missing ones."""
    if ours.outputs.keys() != theirs.outputs.keys() or ours.grads.keys() != theirs.grads.keys():
        return {"outputs": float("inf")}
    apart = {
        "outputs": max(
            (difference(ours.outputs[n], t) for n, t in theirs.outputs.items()), default=0.0
        )
    }
    if theirs.grads:
        apart["gradients"] = difference(flat(ours.grads), flat(theirs.grads))
    return apart


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), theirs.isfinite()):
        return float("inf")
    ours, theirs = (torch.where(t.isfinite(), t, 0.0) for t in (ours, theirs))
    if not theirs.any():
        return 0.0 if not ours.any() else float("inf")
    return distance(ours, theirs)


def mended(sdpa: Outcome, ours: Outcome, eager: Outcome) -> Outcome:
    """Return sdpa's outcome with eager code's values where only sdpa's are not finite.

    Rows of zeros, from queries without a visible key, give non-finite gradients (Gemma 3n takes the
    square root of their mean square). sdpa's backward spreads them to every key and ours does not;
    our finite values must equal eager code's.
    """
    better = Outcome(outputs=sdpa.outputs, grads=dict(sdpa.grads))
    for name in ours.grads.keys() & sdpa.grads.keys() & eager.grads.keys():
        spared = ours.grads[name].isfinite() & ~sdpa.grads[name].isfinite()
        better.grads[name] = torch.where(spared, eager.grads[name], sdpa.grads[name])
    return better


def within(apart: dict[str, float], noise: Noise = dict) -> bool:
    """Return True if two results agree; the model's noise is computed only when it matters."""
    if all(value < LIMIT for value in apart.values()):
        return True
    if max(apart.values()) > conditioned_limit(torch.float32, float("inf")):
        return False
    own = noise()
    return all(
        value < conditioned_limit(torch.float32, own.get(what, 0.0))
        for what, value in apart.items()
    )


def sentence(error: Exception) -> str:
    return " ".join(str(error).split())


def is_refusal(error: Exception) -> bool:
    """Return True if the error names its owner and the reason."""
    return (
        isinstance(error, (ValueError, TypeError, NotImplementedError, RuntimeError))
        and OURS in sentence(error)[:40]
    )


def failed(error: Exception) -> str:
    return (
        f"refused: {sentence(error)}"
        if is_refusal(error)
        else f"fails: {type(error).__name__}: {sentence(error)[:160]}"
    )


def judge(
    ours: Outcome, eager: Outcome, sdpa: Callable[[], Outcome], noise: Noise, padded: bool
) -> str:
    """Return the cell of one comparison; run sdpa only if needed.

    sdpa may be right and eager code wrong if `padded` (a query without visible keys gives zeros in
    one and a mean in the other) or if eager code is not finite. Otherwise a difference of sdpa is
    its fault, and ours must agree with eager code. In transformers 5.17, sdpa drops Gemma 2's
    softcap and UMT5's causality.
    """
    if eager.error is not None:
        return NOTHING
    if ours.error is not None:
        return failed(ours.error)
    apart = off(ours, eager)
    if within(apart, noise):
        return SAME
    excused = padded or not all(
        t.isfinite().all() for t in (*eager.outputs.values(), *eager.grads.values())
    )
    other = sdpa() if excused else eager
    if (
        other.error is None
        and not within(off(other, eager), noise)
        and within(off(ours, mended(other, ours, eager)), noise)
    ):
        return AS_SDPA
    return "differs: " + ", ".join(f"{what} by {value:.1e}" for what, value in apart.items())


# ---- one architecture


class NotBuilt(Exception):
    """Eager code itself cannot be built or run with a tiny config."""


def inputs_for(eager: Any) -> tuple[dict[str, Inputs], dict[str, Outcome]]:
    """Return the inputs by padding and eager code's outcome; raise :class:`NotBuilt` on failure."""
    if type(eager).forward is torch.nn.Module.forward:
        raise NotBuilt("it has no forward of its own")
    error: Exception | None = None
    for plain in make.candidates(eager, "none"):
        outcome = run(eager, plain)
        if outcome.error is None and outcome.outputs:
            given, outcomes = {"none": plain}, {"none": outcome}
            for side in ("left", "right"):
                padded = next(
                    (
                        c
                        for c in make.candidates(eager, side)
                        if c.keys() - MASKS == plain.keys() - MASKS and shapes(c, plain)
                    ),
                    None,
                )
                if padded is not None and padded.keys() != plain.keys():
                    given[side], outcomes[side] = padded, run(eager, padded)
            return given, outcomes
        error = error or outcome.error
    raise NotBuilt(
        f"no inputs found: {type(error).__name__}: {sentence(error)[:200]}"
        if error
        else "no inputs found"
    )


MASKS = {"attention_mask", "decoder_attention_mask"}


def shapes(a: Inputs, b: Inputs) -> bool:
    return all(
        getattr(a[n], "shape", None) == getattr(b[n], "shape", None) for n in b if n not in MASKS
    )


class Trial:
    """One class in its three implementations, with outcomes."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        if (count := subject.parameters()) > MOST_PARAMETERS:
            raise NotBuilt(f"too large: {count} parameters")
        self.eager, error = built(subject, "eager")
        if error is not None:
            raise NotBuilt(f"{type(error).__name__}: {sentence(error)[:200]}") from error
        self.sdpa, self.sdpa_error = built(subject, "sdpa")
        self.ours, self.refusal = built(subject, OURS)
        self.ran: list[Outcome] = []

    def prepare(self) -> None:
        self.inputs, self.theirs = inputs_for(self.eager)
        self.by_sdpa = functools.cache(self._by_sdpa)
        self.noise = functools.cache(self._noise)

    def _by_sdpa(self, side: str) -> Outcome:
        return (
            Outcome(error=self.sdpa_error)
            if self.sdpa is None
            else run(self.sdpa, self.inputs[side])
        )

    def _noise(self, side: str) -> dict[str, float]:
        """Return eager code's change if each weight changes by one rounding."""
        moved, generator = self.subject.build("eager"), make.generator()
        with torch.no_grad():
            for p in {id(p): p for p in moved.parameters()}.values():
                p.mul_(
                    1 + torch.finfo(torch.float32).eps * torch.randn(p.shape, generator=generator)
                )
        return off(run(moved, self.inputs[side]), self.theirs[side])

    def cell(self, model: Any, side: str) -> str:
        ours = run(model, self.inputs[side])
        self.ran.append(ours)
        return judge(
            ours,
            self.theirs[side],
            lambda: self.by_sdpa(side),
            lambda: self.noise(side),
            side != "none",
        )

    def tokens(self, side: str) -> str:
        """Compare the logits of greedy steps, with the forward pass's limit."""
        prompt, ours = self.inputs[side], generated(self.ours, self.inputs[side])
        self.ran.append(ours)
        sdpa = lambda: (
            Outcome(error=self.sdpa_error) if self.sdpa is None else generated(self.sdpa, prompt)
        )
        return judge(
            ours, generated(self.eager, prompt), sdpa, lambda: self.noise(side), side != "none"
        )

    def converted(self, side: str) -> tuple[int, str]:
        """Return the number of converted modules, and the cell of the converted model."""
        model = self.eager if self.ours is None else self.ours
        try:
            done = len(pt.integrations.convert(model).converted)
        except Exception as error:
            return 0, failed(error)
        if not done:
            return done, NOTHING
        said = [self.cell(model, side)]
        # Only `convert` reaches this attention: test every padding.
        if self.ours is None and self.ran[-1].ours:
            said += [self.cell(model, other) for other in self.inputs if other != side]
        return done, next((cell for cell in said if cell != SAME), SAME)


def row(subject: Subject) -> dict[str, Any]:
    """Return all results of one class."""
    trial = Trial(subject)
    try:
        trial.prepare()
    except NotBuilt as problem:
        if trial.refusal is None:
            raise
        return {"verdict": verdict({"build": failed(trial.refusal)}, [], []),
            "cells": {"build": failed(trial.refusal)},
                "reason": str(problem)}  # fmt: skip
    cells: Cells = {}
    if trial.refusal is None:
        cells = {side: trial.cell(trial.ours, side) for side in trial.inputs}
        if trial.eager.can_generate():
            cells["tokens"] = trial.tokens("left" if "left" in trial.inputs else "none")
    else:
        cells["build"] = failed(trial.refusal)
    count, after = trial.converted("right" if "right" in trial.inputs else "none")
    if after != NOTHING:
        cells["convert"] = after
    by_itself = [name for outcome in trial.ran or trial.theirs.values() for name in outcome.left]
    found = {
        "verdict": verdict(cells, trial.ran, by_itself), "inputs": sorted(trial.inputs["none"]),
        "cells": cells, "converted": count,
        "left": sorted(set(by_itself)), "reference": sum(o.reference for o in trial.ran),
        "sdpa": {side: said for side in trial.inputs if (said := compared(trial, side)) != SAME},
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


def built(subject: Subject, implementation: str) -> tuple[Any, Exception | None]:
    try:
        return subject.build(implementation), None
    except Exception as error:
        return None, error


def compared(trial: Trial, side: str) -> str:
    """Return sdpa's comparison with eager code."""
    sdpa, eager = trial.by_sdpa(side), trial.theirs[side]
    if sdpa.error is not None:
        said = sentence(sdpa.error)
        return (
            "refused"
            if "does not support an attention implementation" in said
            else f"{type(sdpa.error).__name__}: {said[:80]}"
        )
    apart = {} if eager.error is not None else off(sdpa, eager)
    return (
        SAME
        if within(apart, lambda: trial.noise(side))
        else f"differs by {max(apart.values()):.1e}"
    )


def verdict(cells: Cells, ran: list[Outcome], by_itself: list[str]) -> str:
    """Return one of :data:`.report.VERDICTS`."""
    if any(cell.startswith(("differs", "fails")) for cell in cells.values()):
        return "wrong"
    if "build" in cells and any(outcome.ours for outcome in ran) and not by_itself:
        return "ours by convert"
    if "build" in cells or all(
        cell.startswith("refused") for name, cell in cells.items() if name != "convert"
    ):
        return "refused"
    if not any(outcome.ours for outcome in ran):
        return "not on the interface" if by_itself else "no attention"
    return "ours in part" if by_itself else "ours"


def rows(model_type: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a model type by the subject's name."""
    try:
        found = subjects(model_type)
    except Exception as error:
        return {
            model_type: {
                "verdict": "not built",
                "reason": f"{type(error).__name__}: {sentence(error)[:200]}",
            }
        }
    made = {}
    for subject in found:
        try:
            made[subject.name] = row(subject)
        except NotBuilt as problem:
            made[subject.name] = {"verdict": "not built", "reason": str(problem)}
        except Exception as error:
            made[subject.name] = {
                "verdict": "not built",
                "reason": f"{type(error).__name__}: {sentence(error)[:200]}",
            }
    return made
