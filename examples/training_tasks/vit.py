# SPDX-License-Identifier: Apache-2.0
"""A Vision Transformer that classifies handwritten digits.

It learns from growing shares of scikit-learn's 8 x 8 digits (extra corpora),
each time from scratch, beside logistic regression on the same images. It is
then fine-tuned at another size, rectangular by default, with interpolated
positions, beside a model trained from scratch at that size. accuracy.png shows
the accuracy by share, distance.png the attention distance of each head, and
distance-over-training.png its development.
"""

from __future__ import annotations

import argparse
from typing import Any

from ._digits import add_shift, add_sizes, classify, digits, held_out_batch, image_collates
from ._run import Figure, Run

_PATCH = 2


def _size(text: str) -> tuple[int, int]:
    try:
        height, width = (int(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected HEIGHTxWIDTH, such as 12x16, got {text!r}"
        ) from None
    return height, width


def _share(text: str) -> float:
    share = float(text)
    if not 0.01 <= share <= 1:
        raise argparse.ArgumentTypeError(
            f"expected a share of the digits between 0.01 and 1, got {text}"
        )
    return share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, steps=1000, width=64, layers=4, batch=32, rate=1e-3)
    add_shift(parser, 0)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--shares", type=_share, nargs="+", default=[0.1, 0.25, 0.5, 1.0], metavar="SHARE",
        help="shares of the 1,200 digits; the last share's model is fine-tuned "
        "(default 0.1 0.25 0.5 1)",
    )  # fmt: skip
    data.add_argument(
        "--size",
        type=_size,
        default=(12, 16),
        metavar="HxW",
        help="to fine-tune at, even numbers of pixels (default 12x16)",
    )
    data.add_argument(
        "--tune-steps", type=int, default=300, help="of fine-tuning (default %(default)s)"
    )


def _model(run: Run, stage: str, size: Any) -> Any:
    from pytransformer.models import ViT, ViTConfig

    from .data.digits import CLASSES

    a = run.arguments
    run.seed(stage)
    return ViT(
        ViTConfig(
            image_size=size, patch_size=_PATCH, channels=1, d_model=a.width, num_layers=a.layers,
            num_heads=4,
            hidden=2 * a.width, dropout=a.dropout, num_labels=CLASSES, label_smoothing=0.1,
        )
    )  # fmt: skip


def train(run: Run) -> int:
    from .data.digits import CLASSES, SIDE, drawn_at, logistic_regression

    a, chance = run.arguments, 1 / CLASSES
    learned, held_out = digits(run)
    run.say(f"{len(learned)} digits to learn from, {len(held_out)} held out")
    curve: dict[str, list[tuple[float, float]]] = {
        "ViT": [],
        "logistic regression on the pixels": [],
    }
    collates = image_collates(run)
    for share in a.shares:
        stage, part = f"share-{100 * share:.0f}", learned.part(0, round(share * len(learned)))
        model = _model(run, stage, SIDE)
        for found, value in zip(
            curve.values(),
            (
                classify(run, stage, model, part, held_out, collates, also=_distances),
                logistic_regression(part, held_out),
            ),
        ):
            found.append((len(part), value))
    figures = [
        Figure(
            f"digits classified correctly, learned from {count}",
            value,
            baseline,
            "logistic regression",
            chance,
            len(held_out),
        )
        for (count, value), (_, baseline) in zip(*curve.values())
    ]
    figures += _resized(run, model, drawn_at(learned, a.size), drawn_at(held_out, a.size))
    distances = _draw(run, model, held_out, curve)
    return run.report(
        figures, accuracy_by_digits=curve, attention_distance_in_pixels=distances, size=list(a.size)
    )


def _resized(run: Run, model: Any, learned: Any, held_out: Any) -> list[Figure]:
    """Fine-tune at another size with interpolated positions, beside as many steps from scratch."""
    from pytransformer.training.objective import held_out_loss

    from .data.digits import CLASSES

    a, collates = run.arguments, image_collates(run)
    run.seed("resized")
    larger = model.resized(a.size)
    batch = held_out_batch(run, held_out, collates[1])
    before = held_out_loss(larger.to(run.world.device).eval(), batch)["accuracy"]
    after = classify(run, "resized", larger, learned, held_out, collates, a.tune_steps)
    fresh = classify(
        run,
        "from-nothing",
        _model(run, "from-nothing", a.size),
        learned,
        held_out,
        collates,
        a.tune_steps,
    )
    size = "{} x {} pixels".format(*a.size)
    return [
        Figure(
            f"at {size}, positions interpolated, not trained there",
            before,
            None,
            "",
            1 / CLASSES,
            len(held_out),
        ),
        Figure(
            f"at {size}, fine-tuned",
            after,
            fresh,
            "from nothing, as many steps",
            1 / CLASSES,
            len(held_out),
        ),
    ]


def _distances(model: Any, batch: Any) -> dict[str, float]:
    """Return each layer's mean attention distance in pixels."""
    from pytransformer import viz

    found = (
        viz.attention_of(model, {"pixel_values": batch["pixel_values"][:64]})
        .patch_distances(model)
        .mean(1)
    )
    return {f"distance_layer_{layer}": distance for layer, distance in enumerate(found.tolist())}


def _draw(
    run: Run, model: Any, held_out: Any, curve: dict[str, list[tuple[float, float]]]
) -> list[list[float]]:
    """Draw the three pictures; return the last share's attention distances, (layers, heads)."""
    from pytransformer import viz

    pixels = held_out.images[:64].to(run.world.device)
    distances = viz.attention_of(model, {"pixel_values": pixels}).patch_distances(model)
    if run.world.first:
        try:
            figure = viz.plot_curves(
                curve,
                "digits to learn from",
                "held-out digits classified correctly",
                title="Accuracy by share of the data",
                log_x=True,
            )
            viz.save(figure, run.out / "accuracy.png")
            rows = run.stages[f"share-{100 * run.arguments.shares[-1]:.0f}"].metrics.rows
            layers = {
                f"layer {layer}": [
                    (row["step"], row[name])
                    for row in rows
                    if (name := f"distance_layer_{layer}") in row
                ]
                for layer in range(len(distances))
            }
            figure = viz.plot_curves(
                layers, "step", "mean attention distance, pixels", title="How far each layer looks"
            )
            viz.save(figure, run.out / "distance-over-training.png")
            viz.save(
                viz.plot_distances(distances, title="How far the heads look", unit="pixels"),
                run.out / "distance.png",
            )
        except ImportError as error:
            run.say(f"no pictures: {error}")
    return [[round(distance, 3) for distance in heads] for heads in distances.tolist()]
