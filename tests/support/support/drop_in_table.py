# SPDX-License-Identifier: Apache-2.0
"""Compare Hugging Face architectures with their eager code, feature by feature.

    python -m support.drop_in_table            # print the table
    python -m support.drop_in_table --write    # into tests/integrations/drop_in.md

Each cell compares a tiny model, registered and converted, with its eager code: logits, gradients,
weights or tokens must agree, and every attention must run our op. A cell contains "ours", "refused"
with the reason, or "–" if the architecture lacks the feature. A difference raises. Needs
transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pytransformer as pt
from pytransformer.ops._core.registry import trace
from support.hugging_face import (
    AS_EXACT,
    FAMILIES,
    MANY,
    Family,
    distance,
    flat,
    inputs_of,
    model_distance_limit,
    real_tokens,
    run,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DOC = Path(__file__).resolve().parents[2] / "integrations" / "drop_in.md"
START, END = (
    "<!-- table of architectures: start, written by support.drop_in_table -->",
    "<!-- table of architectures: end -->",
)
OURS, NOTHING = "ours", "–"
LIMIT = model_distance_limit(torch.float32)
TOKENS = 7


class Different(AssertionError):
    """Ours and eager code disagree, or part of the model bypassed our op."""


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise Different(what)


def build(
    family: Family, implementation: str, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    model = family.build(implementation, dtype)
    if implementation != "eager":
        pt.integrations.convert(model)
    return model


def same_as_eager(
    family: Family, inputs: dict[str, torch.Tensor], real: torch.Tensor | None = None
) -> str:
    logits, grads = run(build(family, "eager"), family, inputs, real)
    with trace() as ran:
        ours, our_grads = run(build(family, "pytransformer"), family, inputs, real)
    calls = [op for op, _ in ran if op.startswith("attention")]
    expect(
        calls == ["attention_fwd"] * family.attentions + ["attention_bwd"] * family.attentions,
        f"attention ran as {calls}",
    )
    expect(distance(ours, logits) < LIMIT, f"logits differ by {distance(ours, logits):.1e}")
    expect(our_grads.keys() == grads.keys(), "gradients reach other parameters")
    off = distance(flat(our_grads), flat(grads))
    expect(off < LIMIT, f"gradients differ by {off:.1e}")
    return OURS


# ---- the features, each (family) -> cell


def padded(side: str) -> Callable[[Family], str]:
    def cell(family: Family) -> str:
        if side != "none" and family.kind in ("image", "audio"):
            return NOTHING
        return same_as_eager(family, inputs_of(family, side))

    return cell


def generated(cache: str | None) -> Callable[[Family], str]:
    """Return a feature that compares generated tokens for prompts (or sources) padded on each side.

    A right-padded decoder predicts the token after the padding. If that query has no visible key
    (its sliding window has only padding), eager code returns a mean and ours returns zeros. Such
    sequences are left out.
    """

    def cell(family: Family) -> str:
        if family.kind not in ("decoder", "seq2seq", "audio"):
            return NOTHING
        # Random models may emit the end token at once, depending on the seed.
        settings: dict[str, Any] = dict(
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            use_cache=cache is not None,
        )
        if cache == "static":
            settings.update(cache_implementation="static", disable_compile=True)
        for side in ("none",) if family.kind == "audio" else ("left", "right"):
            inputs = {
                k: v for k, v in inputs_of(family, side).items() if not k.startswith("decoder_")
            }
            if side == "right" and (window := family.settings.get("sliding_window")):
                sees = inputs["attention_mask"][:, -window:].any(1)
                expect(int(sees.sum()) >= 2, "too few sequences to compare")
                inputs = {k: v[sees] for k, v in inputs.items()}
            tokens = build(family, "eager").generate(**inputs, **settings)
            with trace() as ran:
                ours = build(family, "pytransformer").generate(**inputs, **settings)
            expect(torch.equal(ours, tokens), f"other tokens, padding {side}")
            expect(
                sum(op == "attention_fwd" for op, _ in ran) >= 2 * TOKENS, "attention ran past us"
            )
        return OURS

    return cell


def attention_weights(family: Family) -> str:
    inputs = inputs_of(family, "right")
    with torch.no_grad():
        eager = build(family, "eager")(**inputs, output_attentions=True)
        ours = build(family, "pytransformer")(**inputs, output_attentions=True)
    names = [n for n in eager if n.endswith("attentions") and eager[n]]
    expect(bool(names), "eager code returned no weights")
    for n in names:
        expect(len(ours[n]) == len(eager[n]), f"{len(ours[n])} {n} of {len(eager[n])}")
        key = (
            "decoder_attention_mask"
            if n != "encoder_attentions" and family.kind == "seq2seq"
            else "attention_mask"
        )
        queries = inputs.get(key)
        for theirs, weights in zip(eager[n], ours[n], strict=True):
            # A padding row may have no visible key: zeros.
            if queries is not None and theirs.shape[2] == queries.shape[1]:
                theirs, weights = (t.transpose(1, 2)[queries.bool()] for t in (theirs, weights))
            expect(
                distance(weights, theirs) < LIMIT, f"{n} differ by {distance(weights, theirs):.1e}"
            )
    return OURS


def own_mask(family: Family) -> str:
    """Compare with a 4-dimensional additive mask, which replaces the padding mask unchanged."""
    if family.kind in ("image", "audio"):
        return NOTHING
    inputs = inputs_of(family, "none")
    queries = inputs["decoder_input_ids" if family.kind == "seq2seq" else "input_ids"].shape[1]
    allowed = torch.rand(3, 1, queries, queries, generator=torch.Generator().manual_seed(5)) < 0.5
    allowed |= torch.eye(queries, dtype=torch.bool)
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    name = "decoder_attention_mask" if family.kind == "seq2seq" else "attention_mask"
    return same_as_eager(family, {**inputs, name: mask}, real_tokens(family, inputs))


def bfloat16(family: Family) -> str:
    """Compare in bfloat16: as close to float32 as eager code."""
    inputs = inputs_of(family, "right", batch=MANY)
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    exact, _ = run(build(family, "eager"), family, inputs)
    eager, _ = run(build(family, "eager", torch.bfloat16), family, half)
    ours, _ = run(build(family, "pytransformer", torch.bfloat16), family, half)
    expect(distance(ours, exact) < AS_EXACT * distance(eager, exact), "less exact than eager code")
    return OURS


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model in training mode, which enables checkpoints, without dropout."""
    for module in model.modules():
        for name in (
            "p",
            "dropout",
            "activation_dropout",
            "attention_dropout",
            "layerdrop",
            "encoder_layerdrop",
        ):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    if hasattr(model.config, "apply_spec_augment"):
        model.config.apply_spec_augment = False
    return model.train()


def checkpointing(family: Family) -> str:
    inputs = inputs_of(family, "left")
    _, grads = run(build(family, "eager"), family, inputs)
    model = without_dropout(build(family, "pytransformer"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with trace() as ran:
        _, ours = run(model, family, inputs)
    forward = sum(op == "attention_fwd" for op, _ in ran)
    expect(
        forward == 2 * family.attentions,
        f"{forward} forward calls of attention, not twice {family.attentions}",
    )
    off = distance(flat(ours), flat(grads))
    expect(off < LIMIT, f"gradients differ by {off:.1e}")
    return OURS


def compiled(family: Family) -> str:
    """Compare under torch.compile with fullgraph=True."""
    inputs = inputs_of(family, "right")
    real = real_tokens(family, inputs)
    with torch.no_grad():
        logits = build(family, "eager")(**inputs).logits[real]
        torch._dynamo.reset()
        model = torch.compile(build(family, "pytransformer"), backend="aot_eager", fullgraph=True)
        with trace() as ran:
            ours = model(**inputs).logits[real]
    expect(
        sum(op == "attention_fwd" for op, _ in ran) == family.attentions, "attention ran past us"
    )
    expect(distance(ours, logits) < LIMIT, f"logits differ by {distance(ours, logits):.1e}")
    return OURS


def converted(*words: str) -> Callable[[Family], str]:
    """Return a feature that converts modules whose class name contains one of the words."""

    def cell(family: Family) -> str:
        done = pt.integrations.convert(family.build("pytransformer"))
        mine = [what for _, of, what in done.converted if any(w in of for w in words)]
        left = sorted({reason for _, of, reason in done.skipped if any(w in of for w in words)})
        if left:
            return f"refused: {left[0]}"
        return OURS if mine else NOTHING

    return cell


FEATURES: dict[str, Callable[[Family], str]] = {
    "no padding": padded("none"),
    "left": padded("left"),
    "right": padded("right"),
    "tokens": generated("dynamic"),
    "no cache": generated(None),
    "static cache": generated("static"),
    "weights": attention_weights,
    "own mask": own_mask,
    "bfloat16": bfloat16,
    "checkpoints": checkpointing,
    "compiled": compiled,
    "norms": converted("Norm"),
    "networks and blocks": converted("MLP", "Dense", "Layer", "Block", "Output"),
}


def row(name: str) -> dict[str, str]:
    """Return the cells of one architecture by feature; raise :class:`Different` on a difference."""
    cells = {}
    for feature, cell in FEATURES.items():
        try:
            cells[feature] = cell(FAMILIES[name])
        except Different as problem:
            raise Different(f"{name}, {feature}: {problem}") from problem
    return cells


def lines(rows: dict[str, dict[str, str]]) -> list[str]:
    """Return a Markdown table, followed by the numbered reasons of refusals."""
    reasons: list[str] = []

    def short(cell: str) -> str:
        kind, _, reason = cell.partition(": ")
        if not reason:
            return kind
        if reason not in reasons:
            reasons.append(reason)
        return f"{kind} ({reasons.index(reason) + 1})"

    table = ["| | " + " | ".join(FEATURES) + " |", "|---" * (1 + len(FEATURES)) + "|"]
    table += [
        f"| {name} | " + " | ".join(short(cells[f]) for f in FEATURES) + " |"
        for name, cells in rows.items()
    ]
    return [*table, "", *(f"({i}) {reason}." for i, reason in enumerate(reasons, 1))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="rewrite tests/integrations/drop_in.md instead of printing",
    )
    write = parser.parse_args().write
    pt.integrations.transformers.register()
    text = "\n".join(lines({name: row(name) for name in FAMILIES}))
    if write:
        before, rest = DOC.read_text().split(START)
        DOC.write_text(f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}")
    else:
        print(text)


if __name__ == "__main__":
    main()
