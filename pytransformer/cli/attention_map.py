# SPDX-License-Identifier: Apache-2.0
"""Draw the attention of a model.

MODEL is a folder with a translator from `pytransformer train translate`, a
model saved by pytransformer, or a Hugging Face model (config.json and
safetensors) that can run on this package's attention. A ViT reads an image
file; a Conformer reads an image column by column.

Attention is recomputed from the lse that the fused kernels save, only for the
layers, heads and rows drawn. A model without a class here returns all of it.

kinds: heat      one head as a heat map
       lines     one head as two columns of tokens with lines between them
       gallery   every head of every layer
       distance  mean attention distance of each head, by depth: in tokens, or
                 in pixels for a ViT
       patterns  the self-attention heads that attend most to the next token,
                 the previous token, the same word elsewhere, the same
                 sentence (--second gives another) and special tokens
       positions the model's position encoding
"""

from __future__ import annotations

import argparse
import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..console import Console
from . import OK, UsageError

KINDS = ("heat", "lines", "gallery", "distance", "patterns", "positions")
WHICH = ("encoder", "decoder", "cross")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # fmt: off
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a model")
    parser.add_argument("text", nargs="?",
        help="what the model reads, or the image that it looks at; not needed for positions")
    parser.add_argument("--target", metavar="TEXT",
        help="the decoder's text (default: the translation)")
    parser.add_argument("--second", metavar="TEXT",
        help="a second sentence, for a model that reads two, as BERT does")
    parser.add_argument("--kind", choices=KINDS, default="gallery", metavar="KIND",
        help="see above (default %(default)s)")
    parser.add_argument("--which", choices=WHICH,
        help="attention of which stack (default: cross if there is one)")
    parser.add_argument("--layer", type=int, default=-1,
        help="for heat and lines (default: the last)")
    parser.add_argument("--head", type=int,
        help="for heat and lines (default: the mean of the layer's heads)")
    parser.add_argument("--out", type=Path, default=Path("attention.png"), metavar="FILE",
        help=".png or .svg (default %(default)s)")
    # fmt: on


def run(arguments: argparse.Namespace) -> int:
    try:
        figure = _draw(arguments)
        from .. import viz

        path = viz.save(figure, arguments.out)
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(str(error)) from error
    Console().print(f"wrote {path}")
    return OK


def _draw(arguments: argparse.Namespace) -> Any:
    from .. import viz
    from ..models._base import Model
    from ..viz.models import position_table
    from . import attention_of_hf

    model, encode = _load(arguments.model)
    if arguments.kind == "positions":
        return viz.plot_positions(position_table(model))
    if not arguments.text:
        what = (
            "an image for the model to look at" if _looks(model) else "a text for the model to read"
        )
        raise UsageError(f"--kind {arguments.kind} needs {what}")
    inputs, texts = encode(arguments.text, arguments)
    seen = (viz if isinstance(model, Model) else attention_of_hf).attention_of(
        model, inputs, arguments.which
    )
    about = " / ".join(filter(None, (arguments.text, arguments.second)))
    if arguments.kind == "patterns":
        if seen.which == "cross":
            raise UsageError(
                "--kind patterns is of a stack's own attention: name it with --which encoder or"
                " decoder"
            )
        if seen.which not in texts:
            raise UsageError("--kind patterns is of a text's words")
        return viz.plot_patterns(
            seen.weights(), texts[seen.which], title=f"{seen.which} attention: {about}"
        )
    if arguments.kind == "distance":
        image = hasattr(model, "patches")
        far = seen.patch_distances(model) if image else seen.distances()
        return viz.plot_distances(
            far, title=f"{seen.which} attention: {about}", unit="pixels" if image else "tokens"
        )
    if arguments.kind == "gallery":
        return viz.gallery(seen.weights(), title=f"{seen.which} attention: {about}")
    heads = None if arguments.head is None else [arguments.head]
    weights = seen.weights(layers=[arguments.layer], heads=heads)[0].mean(0)
    what = "mean of the heads" if heads is None else f"head {arguments.head}"
    queries, keys = (
        texts[stack].tokens if stack in texts else [str(n) for n in range(count)]
        for stack, count in zip(
            (seen.which, "encoder" if seen.which == "cross" else seen.which), weights.shape
        )
    )
    title = f"{seen.which} attention, layer {arguments.layer % len(seen.taps)}, {what}"
    if arguments.kind == "lines":
        return viz.head_lines(weights, queries, keys, title=title)
    rows_are = "generates" if seen.which == "cross" else "query"
    return viz.heat_map(weights, queries, keys, title=title, rows_are=rows_are)


def _load(folder: Path) -> tuple[Any, Any]:
    """Return the model in eval mode and a function that prepares its inputs.

    The function maps text and arguments to the inputs and the tokens that each stack reads.
    """
    from ..models import Conformer
    from ..training import Translator
    from ..viz.models import hugging_face_types, load_model
    from . import attention_of_hf

    if (folder / "translator.json").is_file():
        translator = Translator.load(folder)
        return translator.model, partial(_translator_inputs, translator)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; expected the folder of a model")
    kind = _hugging_face_type(folder)
    if kind is not None and kind not in hugging_face_types():
        model = attention_of_hf.load(folder)
        if _looks(model):
            return model, partial(_image_inputs_of_hf, model)
    else:
        model = load_model(folder)
    if hasattr(model, "patches"):
        return model, partial(_image_inputs, model)
    if isinstance(model, Conformer):
        return model, partial(_strip_inputs, model)
    if not (folder / "tokenizer.json").is_file():
        return model, _no_tokenizer(folder)
    return model, partial(_tokenizer_inputs, folder, model)


Inputs = tuple[dict[str, torch.Tensor], dict[str, Any]]


def _text(tokens: list[str], special: list[bool], sentences: list[int] | None = None) -> Any:
    from ..viz import Text

    return Text(
        tokens,
        torch.tensor(sentences or [0] * len(tokens)),
        torch.tensor(special, dtype=torch.bool),
    )


def _image_inputs(model: Any, path: str, arguments: argparse.Namespace) -> Inputs:
    from ..training import read_image

    channels, *size = model.patches.image_shape
    pixels = read_image(path, tuple(size), channels)[None].to(model.patches.projection.weight.dtype)
    rows, columns = model.patches.grid
    tokens = ["[CLS]", *(f"{r},{c}" for r in range(rows) for c in range(columns))]
    return {"pixel_values": pixels}, {"encoder": _text(tokens, [True] + [False] * (rows * columns))}


def _hugging_face_type(folder: Path) -> str | None:
    """Return the model_type of a folder that transformers wrote, else None."""
    config = folder / "config.json"
    return json.loads(config.read_text()).get("model_type") if config.is_file() else None


def _looks(model: Any) -> bool:
    """Return True if the model reads images."""
    from ..models import Conformer

    return (
        hasattr(model, "patches")
        or isinstance(model, Conformer)
        or getattr(model, "main_input_name", "") == "pixel_values"
    )


def _image_inputs_of_hf(model: Any, path: str, arguments: argparse.Namespace) -> Inputs:
    from ..training import read_image

    size = getattr(model.config, "image_size", None)
    if size is None:
        raise UsageError(
            f"{type(model).__name__} has no image_size in its config: the size to read {path} at is"
            " not known"
        )
    pixels = read_image(
        path,
        tuple(size) if isinstance(size, list) else size,
        getattr(model.config, "num_channels", 3),
    )
    return {"pixel_values": pixels[None].to(model.dtype)}, {}


def _strip_inputs(model: Any, path: str, arguments: argparse.Namespace) -> Inputs:
    """Return a gray image as frames: its columns, resized to the feature count."""
    from ..training.images import image_shape, read_image

    rows, (height, width) = model.config.input_dim, image_shape(path)
    columns = max(1, round(width * rows / height))
    frames = read_image(path, (rows, columns), 1)[0].T[None]
    step = columns if model.subsampling is None else model.subsampling.frames(columns)
    tokens = [str(n) for n in range(step)]
    return {"input_features": frames}, {"encoder": _text(tokens, [False] * step)}


def _no_tokenizer(folder: Path) -> Any:
    def encode(text: str, arguments: argparse.Namespace) -> Any:
        raise UsageError(f"{folder} has no tokenizer.json for the text")

    return encode


def _translator_inputs(translator: Any, text: str, arguments: argparse.Namespace) -> Inputs:
    if arguments.second is not None:
        raise UsageError("--second is for models that read two sentences; a translator reads one")
    source = [*translator.source.encode(text), translator.source.end_id]
    if arguments.target is None:
        (said,) = translator.translate_ids([text], 1, None)[1]
    else:
        said = translator.target.encode(arguments.target)
    read = [translator.target.start_id, *said]
    inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([read])}
    last, first = (
        [n == len(source) - 1 for n in range(len(source))],
        [n == 0 for n in range(len(read))],
    )
    texts = {
        "encoder": _text(translator.source.tokens(source), last),
        "decoder": _text(translator.target.tokens(read), first),
        "cross": _text(translator.target.tokens([*read[1:], translator.target.end_id]), first),
    }
    return inputs, texts


def _tokenizer_inputs(folder: Path, model: Any, text: str, arguments: argparse.Namespace) -> Inputs:
    from ..extras import require

    tokenizer = require("tokenizers", "models", "reading text").Tokenizer.from_file(
        str(folder / "tokenizer.json")
    )
    two = hasattr(model, "segments") or getattr(model.config, "type_vocab_size", 0) > 1
    if arguments.second is not None and not two:
        raise UsageError(
            "--second is for models that read two sentences, as BERT does; this is a"
            f" {type(model).__name__}"
        )
    encoding = tokenizer.encode(text, arguments.second)
    inputs = {"input_ids": torch.tensor([encoding.ids])}
    special = [bool(n) for n in encoding.special_tokens_mask]
    # Without special tokens, the first token serves as the attention sink.
    read = _text(
        encoding.tokens,
        special if any(special) else [n == 0 for n in range(len(special))],
        encoding.type_ids,
    )
    texts = {"encoder": read, "decoder": read}
    if _takes(model, "decoder_input_ids"):
        said = tokenizer.encode(arguments.target or "", add_special_tokens=False)
        names = ("start_token_id", "decoder_start_token_id", "bos_token_id")
        start = next(
            (n for name in names if (n := getattr(model.config, name, None)) is not None), 0
        )
        inputs["decoder_input_ids"] = torch.tensor([[start, *said.ids]])
        tokens = [
            json.dumps(start) if (name := tokenizer.id_to_token(start)) is None else name,
            *said.tokens,
        ]
        first = [n == 0 for n in range(len(tokens))]
        texts["decoder"] = _text(tokens, first)
        texts["cross"] = _text([*said.tokens, "(next)"], first)
    elif two:
        inputs["token_type_ids"] = torch.tensor([encoding.type_ids])
    return inputs, texts


def _takes(model: Any, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters
