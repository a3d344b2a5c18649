# SPDX-License-Identifier: Apache-2.0
"""Translate sentences with a model from `pytransformer train translate`.

Also draws the decoder's cross-attention: a row per output token, a column per
input token. It is recomputed from the lse that the fused kernels save, only for
the layer drawn.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import Console
from . import OK, UsageError

if TYPE_CHECKING:
    from ..training import Translator

DEFAULT_OUT = Path("results") / "translate"  # the default of `pytransformer train translate`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # fmt: off
    parser.add_argument("text", nargs="*",
        help="sentences; none: the lines of standard input, without pictures")
    parser.add_argument("--model", type=Path, default=DEFAULT_OUT, metavar="DIR",
        help="default %(default)s")
    parser.add_argument("--beams", type=int, default=4,
        help="hypotheses of beam search, 1 for greedy (default %(default)s)")
    parser.add_argument("--map", type=Path, metavar="FILE",
        help="picture of the cross-attention, .png or .svg (default: attention.png in --model)")
    parser.add_argument("--no-map", action="store_true", help="draw no picture")
    parser.add_argument("--layer", type=int, default=-1,
        help="layer drawn, the mean of its heads (default the last)")
    parser.add_argument("--head", type=int, help="draw this head alone")
    # fmt: on


def run(arguments: argparse.Namespace) -> int:
    from ..training import Translator

    console = Console()
    try:
        translator = Translator.load(arguments.model)
    except FileNotFoundError as error:
        raise UsageError(
            f"no translator in {arguments.model} ({error}): train one with `pytransformer train"
            " translate --data FILE`"
        ) from error
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(str(error)) from error
    texts = arguments.text or [line.strip() for line in sys.stdin if line.strip()]
    if any(not text.strip() for text in texts):
        raise UsageError("an empty sentence; expected some words")
    try:
        for text in texts:
            console.print(translator.translate([text], beams=arguments.beams)[0])
        if arguments.text and not arguments.no_map:
            console.print(_draw(translator, texts, arguments))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return OK


def _draw(translator: Translator, texts: list[str], arguments: argparse.Namespace) -> str:
    """Draw one picture per text; return its path or why there is none."""
    from .. import viz

    first = arguments.map or arguments.model / "attention.png"
    written = []
    try:
        for number, text in enumerate(texts, 1):
            aligned = translator.align(text, beams=arguments.beams)
            layers, heads = aligned.weights.shape[:2]
            if not -layers <= arguments.layer < layers:
                raise UsageError(
                    f"--layer must be between 0 and {layers - 1}, got {arguments.layer}"
                )
            if arguments.head is not None and not 0 <= arguments.head < heads:
                raise UsageError(f"--head must be between 0 and {heads - 1}, got {arguments.head}")
            layer = aligned.weights[arguments.layer]
            drawn = layer.mean(0) if arguments.head is None else layer[arguments.head]
            what = "mean of the heads" if arguments.head is None else f"head {arguments.head}"
            title = f"Cross-attention, layer {arguments.layer % layers}, {what}"
            path = first if number == 1 else first.with_stem(f"{first.stem}-{number}")
            written.append(
                viz.save(
                    viz.heat_map(
                        drawn,
                        aligned.target_tokens,
                        aligned.source_tokens,
                        title=title,
                        rows_are="generates",
                    ),
                    path,
                )
            )
    except ImportError as error:
        return f"no picture: {error}"
    return "cross-attention: " + ", ".join(map(str, written))
