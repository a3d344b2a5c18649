# SPDX-License-Identifier: Apache-2.0
"""timm's families and diffusers' models, small, with random weights: their code against ours.

    python -m support.sweep.libraries            # print a table
    python -m support.sweep.libraries --write    # write the results file, docs/other-libraries.md

Each model runs unchanged, under ``activate()``, and after ``convert`` under ``activate()``. The
comparison covers outputs and all parameter gradients, with the rules of :mod:`.compare`. Needs timm
and diffusers, and torchvision, which timm imports.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

import pytransformer as pt
from pytransformer.console import Console, escape_markdown

from .compare import Cells, NotBuilt, Outcome, failed, judge, off, run, sentence, verdict
from .diffusion import MODELS
from .inputs import Inputs, generator
from .report import ROOT, clean, counts
from .run import sweep
from .subjects import MOST_PARAMETERS, nan_where_uninitialised, stirred
from .watch import SOFTMAXES

Rows = dict[str, dict[str, Any]]
RESULTS, DOC = (
    ROOT / "tests" / "integrations" / "libraries.json",
    ROOT / "docs" / "other-libraries.md",
)
VERDICTS = {
    "ours": "every attention runs on the op; results agree with the model's code",
    "ours in part": "the same, but the classes in parentheses compute attention themselves",
    "not on the interface": (
        "the model computes attention itself; results agree, also after `convert`"
    ),
    "no attention": "no attention module computes attention; results agree, also after `convert`",
    "wrong": "results differ, or a call fails",
    "not built": "the reason in parentheses prevents a small model",
}
BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
SMALLEST = re.compile(
    r"test|atto|femto|pico|nano|xxs|xxtiny|xx_small|xtiny|xs_|_xs|tiny|small|mini|_s_|_b0|_b1|lite"
)
ATTENDS = re.compile(
    r"scaled_dot_product|softmax\(|Attention\(|import .*Attention|VisionTransformer"
)
STAGES = (1, 1, 1, 1)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"img_size": 64, "depth": 2}, {"img_size": 64, "depths": STAGES}, {"depths": STAGES},
    {"stages": STAGES}, {"layers": STAGES},
    {"img_size": 64}, {"depth": 2}, {},
)  # fmt: skip
SIDES = (64, 128, 224, 256)


def load(name: str) -> Any:
    """Return the library; raise ImportError or RuntimeError.

    torchvision's operators are declared first, so that it imports without its C++ library, which
    only its CUDA wheels have.
    """
    global _library
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            _library.define(operator + BOXES)
    return importlib.import_module(name)


_library: Any = None


def subjects() -> list[str]:
    """Return timm's model files with attention, and the models of :data:`.diffusion.MODELS`."""
    attends = [
        m
        for m in load("timm").list_modules()
        if ATTENDS.search(inspect.getsource(load(f"timm.models.{m}")))
    ]
    return [f"timm/{module}" for module in attends] + [f"diffusers/{name}" for name in MODELS]


# ---- building


def families(module: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield models of a timm file in their smallest form, the likely smallest first."""
    timm = load("timm")
    names = timm.list_models(module=module)
    for name in sorted(names, key=lambda n: (not SMALLEST.search(n), len(n)))[:4]:
        for settings in SETTINGS:
            yield name, functools.partial(timm.create_model, name, **settings)


def images(side: int) -> Inputs:
    return {"x": torch.randn(2, 3, side, side, generator=generator())}


def attempts(subject: str) -> Iterator[tuple[str, Callable[[], Any], Inputs]]:
    library, _, name = subject.partition("/")
    if library == "timm":
        for model, build in families(name):
            for side in SIDES:
                yield model, build, images(side)
    else:
        settings, inputs = MODELS[name]
        yield name, functools.partial(getattr(load("diffusers"), name), **settings), inputs()


def parameters(build: Callable[[], Any]) -> int:
    """Return the parameter count, without building the parameters if the model allows it."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in build().parameters())
    except (NotImplementedError, RuntimeError):  # the model computes during construction
        return sum(p.numel() for p in build().parameters())


def built(subject: str) -> tuple[str, Any, Inputs, Outcome]:
    """Return the subject's first model that builds and runs; raise :class:`NotBuilt` on failure."""
    error: Exception | None = None
    models: dict[Any, Any] = {}
    for name, build, inputs in attempts(subject):
        try:
            if build not in models:
                models = {build: None}
                if (count := parameters(build)) > MOST_PARAMETERS:
                    raise NotBuilt(f"too large: {count} parameters")
                torch.manual_seed(7)
                with nan_where_uninitialised():
                    models = {build: stirred(build())}
        except Exception as problem:
            error = problem
        if models[build] is None:
            continue
        outcome = run(copy.deepcopy(models[build]), inputs)
        if outcome.error is None and outcome.outputs:
            return name, models[build], inputs, outcome
        error = outcome.error or error
    raise NotBuilt(f"{type(error).__name__}: {sentence(error)[:160]}" if error else "no models")


# ---- comparing


def as_double(value: Any) -> Any:
    return (
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    )


def row(model: Any, inputs: Inputs, theirs: Outcome) -> dict[str, Any]:
    """Return all results of a model.

    Each run uses a copy, because some timm models store a bias with its graph in eval mode.
    """

    def noise() -> dict[str, float]:
        """Return the change of the library's code under one rounding of weights, or in float64.

        Pooling may select either of two nearly equal numbers (hieradet_sam2: 1.9e-4 of the
        gradients in one of four draws).
        """
        moved, draw = copy.deepcopy(model), generator()
        with torch.no_grad():
            for p in moved.parameters():
                p.mul_(1 + torch.finfo(torch.float32).eps * torch.randn(p.shape, generator=draw))
        found = off(run(moved, inputs), theirs)
        exact = run(copy.deepcopy(model).double(), tree_map(as_double, inputs))
        if exact.error is None:
            found = {what: max(far, found[what]) for what, far in off(exact, theirs).items()}
        return found

    ran: list[Outcome] = []

    def cell(model: Any) -> str:
        with pt.activate():
            ran.append(run(model, inputs, SOFTMAXES))
        return judge(ran[-1], theirs, lambda: theirs, functools.cache(noise), padded=False)

    cells: Cells = {"activate": cell(copy.deepcopy(model))}
    try:
        converted = copy.deepcopy(model)
        done = len(pt.integrations.convert(converted).converted)
        if done:
            cells["convert"] = cell(converted)
    except Exception as error:
        done, cells["convert"] = 0, failed(error)
    left = sorted({name for outcome in ran for name in outcome.left})
    found = {
        "verdict": verdict(cells, ran, left), "cells": cells, "converted": done, "left": left,
        "calls": ran[0].ours, "reference": sum(outcome.reference for outcome in ran),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


def rows(subject: str) -> Rows:
    """Return the subject's row, named after the model that represents it."""
    try:
        name, model, inputs, theirs = built(subject)
        if subject.startswith("timm/"):
            subject = f"{subject}: {name}"
        return {subject: row(model, inputs, theirs)}
    except NotBuilt as problem:
        return {
            subject: {"verdict": "not built", "reason": str(problem).removeprefix("NotBuilt: ")}
        }
    except Exception as error:
        return {
            subject: {
                "verdict": "not built",
                "reason": f"{type(error).__name__}: {sentence(error)[:160]}",
            }
        }


# ---- results and page


def load_results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def save(found: Rows) -> None:
    """Write one row per line."""
    versions = {name: load(name).__version__ for name in ("timm", "diffusers")}
    head = json.dumps({**versions, "torch": torch.__version__.split("+")[0]})
    lines = [
        f"  {json.dumps(name)}: {json.dumps(row, ensure_ascii=False)}"
        for name, row in sorted(clean(found).items())
    ]
    RESULTS.write_text(head[:-1] + ', "rows": {\n' + ",\n".join(lines) + "\n}}\n")


EXAMPLE = """```python
import torch
import pytransformer as pt

model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)  # or timm.create_model(...)
conversion = pt.integrations.convert(model)  # optional: norms, networks and blocks
with pt.activate():
    y = model(torch.randn(2, 16, 64))
```"""


def models(found: Rows, word: str) -> str:
    """Return the models of a verdict as a paragraph, with their attention classes or the reason."""
    names = []
    for name, row in found.items():
        if row["verdict"] == word:
            note = ", ".join(row.get("left", ())) or row.get("reason", "").partition(":")[0]
            names.append(name.partition(": ")[0] + (f" ({escape_markdown(note)})" if note else ""))
    return paragraph(f"**{word.capitalize()}**: {', '.join(names)}.")


def paragraph(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def page(results: dict[str, Any]) -> str:
    """Return docs/other-libraries.md; the results file also counts calls and converted modules."""
    found: Rows = results["rows"]
    verdicts = [
        f"| {word} | {counts(found)[word]} | {meaning} |" for word, meaning in VERDICTS.items()
    ]
    return "\n".join([
        "# timm and diffusers", "",
        "<!-- generated by python -m support.sweep.libraries --write: do not edit -->", "",
        EXAMPLE, "",
        paragraph(
            "`activate()` runs the attention of models that call `scaled_dot_product_attention`. A "
            "sweep builds one "
            f"small model per file of timm {results['timm']} that has attention, and models of "
            f"diffusers "
            f"{results['diffusers']}, with random weights in float32 on a CPU (torch "
            f"{results['torch']}). It compares "
            "outputs and all gradients of the model's code with those under `activate()`, and "
            "after `convert` under "
            "`activate()`. An unsupported call raises in the sweep. The limit is that of "
            "[transformers](../tests/integrations/architectures.md); the "
            "[results](../tests/integrations/libraries.json) count calls and converted modules."
        ), "",
        "| result | models | meaning |", "|---|---|---|", *verdicts, "",
        "\n\n".join(models(found, word) for word in VERDICTS if counts(found)[word]), "",
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "subjects",
        nargs="*",
        metavar="subject",
        help="as timm/eva or diffusers/UNet2DModel (default: all)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"put them into {RESULTS.name}, and write docs/{DOC.name}",
    )
    arguments = parser.parse_args()
    prepare()
    found: Rows = {}
    console = Console(sys.stderr)
    chosen = arguments.subjects or subjects()
    with console.progress(len(chosen)) as progress:
        for subject, made in sweep(chosen, rows=rows):
            found |= made
            progress.advance()
            progress.step(f"{subject}: {', '.join(row['verdict'] for row in made.values())}")
    if arguments.write:
        earlier = load_results()["rows"] if arguments.subjects else {}
        save(
            {name: row for name, row in earlier.items() if name.partition(":")[0] not in chosen}
            | found
        )
        DOC.write_text(page(load_results()))
    Console().table(
        ("model", "verdict", "differs"),
        [
            (
                n,
                r["verdict"],
                r.get("reason", "") or "; ".join(c for c in r["cells"].values() if c != "same"),
            )
            for n, r in found.items()
        ],
    )
    return 1 if counts(found)["wrong"] else 0


def prepare() -> None:
    """Import shared modules for the children; a call that our op would decline is an error."""
    os.environ["PYTRANSFORMER_STRICT"] = "1"
    load("timm")
    diffusers = load("diffusers")
    for name in MODELS:
        getattr(diffusers, name)


if __name__ == "__main__":
    sys.exit(main())
