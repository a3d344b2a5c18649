# SPDX-License-Identifier: Apache-2.0
"""A Vision Transformer from scratch: classify generated shapes and plot attention distance.

python examples/vit.py             about a minute on two cores; writes vit-distance.png
python examples/vit.py --steps 20 --images FOLDER      your images, one folder per class
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from pytransformer import viz
from pytransformer.console import Console
from pytransformer.models import ViT, ViTConfig
from pytransformer.training import (
    Batches,
    ImageFolder,
    Recipe,
    Trainer,
    collate_images,
    of_model,
    warmup_cosine,
)

SIZE = 32
SHAPES = ("disc", "square", "cross", "ring")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=250, help="default %(default)s")
    parser.add_argument("--width", type=int, default=64, help="d_model (default %(default)s)")
    parser.add_argument("--patch", type=int, default=4, help="pixels a side (default %(default)s)")
    parser.add_argument(
        "--count", type=int, default=2000, help="images to generate (default %(default)s)"
    )
    parser.add_argument("--images", type=Path, help="folder with a folder of images for each class")
    parser.add_argument(
        "--out", type=Path, default=Path("vit-distance.png"), help="default %(default)s"
    )
    return parser.parse_args(arguments)


def draw(shape: int, generator: torch.Generator) -> torch.Tensor:
    """Return one shape with random position, size and brightness on noise, (1, SIZE, SIZE)."""
    x, y, radius, light = (
        torch.rand(4, generator=generator) * torch.tensor([14.0, 14.0, 4.0, 0.6])
    ).tolist()
    rows, columns = torch.meshgrid(
        torch.arange(SIZE) - x - 9, torch.arange(SIZE) - y - 9, indexing="ij"
    )
    radius += 4
    far, square = (rows**2 + columns**2).sqrt(), torch.maximum(rows.abs(), columns.abs())
    inside = (
        far <= radius,
        square <= radius * 0.89,  # the same area as the disc
        (torch.minimum(rows.abs(), columns.abs()) <= radius / 3) & (square <= radius),
        (far <= radius) & (far >= radius * 0.6),
    )[shape]
    noise = 0.2 * torch.randn(SIZE, SIZE, generator=generator)
    return (noise + inside * (0.4 + light))[None]


def generated(count: int, seed: int) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(seed)
    return [(draw(i % len(SHAPES), generator), i % len(SHAPES)) for i in range(count)]


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """Return the held-out accuracy, and that of the most frequent class."""
    options = parse(arguments)
    if options.images is not None:
        folder = ImageFolder(options.images, SIZE, channels=1)
        order = torch.randperm(len(folder), generator=torch.Generator().manual_seed(0)).tolist()
        examples, classes = [folder[i] for i in order], folder.classes
        cut = max(1, len(examples) // 5)
        held_out, examples = examples[:cut], examples[cut:]
    else:
        examples, held_out, classes = generated(options.count, 0), generated(200, 1), SHAPES
    torch.manual_seed(0)
    shape = dict(
        image_size=SIZE,
        patch_size=options.patch,
        channels=1,
        d_model=options.width,
        hidden=4 * options.width,
    )
    model = ViT(ViTConfig(num_layers=4, num_heads=4, num_labels=len(classes), dropout=0.1, **shape))
    print(
        f"{len(examples)} images of {len(classes)} classes, {model.num_parameters() / 1e6:.2f}"
        " million parameters"
    )
    batches = Batches(examples, 32, lambda batch, generator: collate_images(batch))
    recipe = Recipe(steps=options.steps, log_every=max(1, options.steps // 5), clip=1.0)
    schedule = warmup_cosine(2e-3, options.steps // 10, options.steps)
    Trainer(model, of_model, batches, recipe, schedule, console=Console()).fit()
    batch = collate_images(held_out)
    model.eval()
    with torch.no_grad():
        said = model(batch["pixel_values"]).logits.argmax(-1)
    share = (said == batch["labels"]).float().mean().item()
    most = batch["labels"].bincount().max().item() / len(said)
    print(
        f"{100 * share:.1f} % of {len(said)} held-out images told right; always the same class:"
        f" {100 * most:.1f} %"
    )
    seen = viz.attention_of(model, {"pixel_values": batch["pixel_values"][:16]})
    distances = seen.patch_distances(model)
    for layer, heads in enumerate(distances.tolist()):
        print(
            f"   layer {layer}: mean attention distance of its heads"
            f" {', '.join(f'{d:.1f}' for d in heads)} pixels"
        )
    try:
        figure = viz.plot_distances(
            distances, title="Mean attention distance by depth", unit="pixels"
        )
    except ImportError as error:
        print(f"no picture: {error}")
    else:
        print(f"wrote {viz.save(figure, options.out)}")
    return share, most


if __name__ == "__main__":
    main()
