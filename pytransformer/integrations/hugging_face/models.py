# SPDX-License-Identifier: Apache-2.0
"""Checks that a transformers architecture uses the attention interface, on build or switch.

transformers also inspects the source of a model's file (``_can_set_attn_implementation``), but it
only warns, and only when a built model is switched. :func:`watch` adds a check in
``PreTrainedModel.get_correct_attn_implementation``, which every request reaches. Requests for other
implementations are unchanged.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(\s*nn\.Module\b", re.MULTILINE)
_ASKS_THE_INTERFACE = re.compile(r"\bALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")
_OWN_TABLE = re.compile(r"\b(?!ALL_)[A-Z0-9_]+\[\s*(self\.)?config\._attn_implementation\s*\]")


def watch(ours: Any) -> None:
    """Check every model that requests the attention function ``ours``. Idempotent."""
    method = PreTrainedModel.get_correct_attn_implementation
    if getattr(method, "watches", None) is ours:
        return

    @functools.wraps(method)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if (
            requested_attention is not None
            and ALL_ATTENTION_FUNCTIONS.get(requested_attention) is ours
        ):
            check(self)
        return method(self, requested_attention, *args, **kwargs)

    checked.watches = ours  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked


def pickle_with_name(ours: Any, rebuild: Any) -> None:
    """Make configs that name the attention function ``ours`` register the name when unpickled.

    A spawned process has only transformers' names. Every model, converted or not, and most of their
    modules have a config. Other configs pickle as before. Idempotent.
    """
    if getattr(PreTrainedConfig.__reduce_ex__, "pickles", None) is ours:
        return
    before = PreTrainedConfig.__reduce_ex__

    def reduce(self: Any, protocol: Any) -> Any:
        reduced = before(self, protocol)
        name = getattr(self, "_attn_implementation", None)
        if not isinstance(name, str) or ALL_ATTENTION_FUNCTIONS.get(name) is not ours:
            return reduced
        return (rebuild, (name, *reduced[:2]), *reduced[2:])

    reduce.pickles = ours  # type: ignore[attr-defined]
    PreTrainedConfig.__reduce_ex__ = reduce


def check(model: Any) -> None:
    """Raise ValueError if the model cannot call our attention.

    Raises:
        ValueError: its file has attention classes that do not use the interface, or a private table
            of classes.
    """
    reason = why_not(type(model).__module__)
    if reason is not None:
        raise ValueError(
            f"pytransformer: {described(model.config, type(model).__name__)} {reason}; use"
            " attn_implementation='eager', for this part alone with a dict of its sub_configs, and"
            " pytransformer.integrations.convert(model), which tells what of it becomes ours"
        )


@functools.cache
def why_not(module: str) -> str | None:
    """Return why models of this Python module cannot use a registered attention, or None.

    Without source the result is None.
    """
    file = sys.modules.get(module)
    try:
        source = inspect.getsource(file) if file is not None else ""
    except (OSError, TypeError):
        source = ""
    if _OWN_TABLE.search(source):
        return (
            "chooses among attention classes of its own, where only transformers' names are known"
        )
    if _ATTENTION_CLASS.search(source) and not _ASKS_THE_INTERFACE.search(source):
        return (
            "computes attention in code of its own and never asks transformers' attention interface"
        )
    return None


def described(config: Any, name: str | None = None) -> str:
    """Return a model's description for messages, by class name (if given) and config."""
    return (
        f"{name or type(config).__name__.removesuffix('Config')} (model type"
        f" {getattr(config, 'model_type', None)!r})"
    )
