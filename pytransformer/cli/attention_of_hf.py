# SPDX-License-Identifier: Apache-2.0
"""Attention of a Hugging Face model without a class here.

transformers loads the model and runs it with this package's attention op.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..extras import require

_FIELDS = {
    "encoder": ("encoder_attentions", "attentions"),
    "decoder": ("decoder_attentions",),
    "cross": ("cross_attentions",),
}


def load(folder: Path) -> Any:
    """Return the model in eval mode with our attention; load safetensors only, run no folder code.

    Raises:
        ValueError: transformers cannot read the folder, or the model does not use its attention
            interface.
        ImportError: transformers is not installed.
    """
    transformers = require(
        "transformers", "hf", "a Hugging Face model that pytransformer.models has no class for"
    )
    from ..integrations.transformers import NAME, register

    register()
    try:
        model = transformers.AutoModel.from_pretrained(
            folder,
            attn_implementation=NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise ValueError(f"{folder}: {error}") from error
    return model.eval()


@torch.no_grad()
def attention_of(model: Any, inputs: dict[str, torch.Tensor], which: str | None = None) -> Any:
    """Return what :func:`pytransformer.viz.attention_of` returns, from the weights of the output.

    Raises:
        ValueError: the model returned no weights, or none for the stack.
    """
    from .. import viz
    from ..viz.models import which_stack

    out = model(**inputs, output_attentions=True)
    found = {}
    for stack, names in _FIELDS.items():
        given = [out[name] for name in names if name in out and out[name] is not None]
        if given and all(weights is not None for weights in given[0]):
            found[stack] = tuple(
                viz.Returned(weights) for weights in given[0] if weights.dim() == 4
            )
    if "attentions" in out and _is_causal(found.get("encoder", ())):
        found["decoder"] = found.pop("encoder")
    found = {stack: taps for stack, taps in found.items() if taps}
    name = type(model).__name__
    if not found:
        raise ValueError(
            f"{name} returns no attention weights of full sequences: there is nothing to plot"
        )
    which = which_stack(found, which, name)
    return viz.Seen(which, found[which])


def _is_causal(taps: Any) -> bool:
    return bool(taps) and all(bool((tap.all_weights.triu(1) == 0).all()) for tap in taps)
