# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: ``register()``, then ``attn_implementation="pytransformer"``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

NAME = "pytransformer"
INSTALL = "run pip install transformers"


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` mean this package, in every model that uses transformers' attention interface.

    Registers both the attention and the mask that goes with it (:mod:`pytransformer.integrations.hugging_face`), and has models
    that ask for ``name`` checked when they are built: one that computes attention in code of its own raises ValueError. Nothing
    changes for other implementations. Idempotent; never done on import. A pickled model registers the
    name where it is loaded, in a spawned process too. :func:`switch` changes a model that is already built.

    Raises:
        ImportError: transformers is not installed, or too old to have the interfaces.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"pytransformer: attn_implementation={name!r} needs transformers; {INSTALL} ({error})") from error
    try:
        from transformers import AttentionInterface, AttentionMaskInterface

        from . import hugging_face
        from .hugging_face import models
    except ImportError as error:
        raise ImportError(
            f"pytransformer: attn_implementation={name!r} cannot be registered with transformers {transformers.__version__}: "
            f"{error}; transformers >= 5.17 is supported"
        ) from error
    AttentionInterface.register(name, hugging_face.attention_forward)
    AttentionMaskInterface.register(name, hugging_face.attention_mask)
    models.watch(hugging_face.attention_forward)
    models.pickle_with_name(hugging_face.attention_forward, _rebuild)


def _rebuild(name: str, build: Any, arguments: tuple[Any, ...]) -> Any:
    """Register the name where it is unknown, then build the config as its pickle describes. A config is
    rebuilt by copy.deepcopy too, where the name may have a mask function of the user's."""
    from transformers import AttentionInterface

    if name not in AttentionInterface():
        register(name)
    return build(*arguments)


def switch(model: Any, name: str = NAME) -> None:
    """``model.set_attn_implementation(name)``, for the models inside it too.

    transformers 5.17 leaves a T5's encoder and decoder as they were: theirs is a copy of the model's config.

    Raises:
        ValueError: ``name`` is ours, and the model or one inside computes attention in code of its own; nothing has changed then.
    """
    from transformers import PreTrainedModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from . import hugging_face
    from .hugging_face import models

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if ALL_ATTENTION_FUNCTIONS.get(name) is hugging_face.attention_forward:
        for part in parts:
            models.check(part)
    for part in parts:
        part.set_attn_implementation(name)


def growing_cache(model: Any) -> Any:
    """Return an empty cache for ``model.generate(..., past_key_values=growing_cache(model))``.

    A ``DynamicCache`` copies all keys and values for each token. This cache allocates a quarter more
    memory and writes the token in place. For an encoder-decoder it is an ``EncoderDecoderCache``. It
    works with any ``attn_implementation``. transformers 5.24 names the keyword ``cache``.
    """
    from .hugging_face.growing import growing_cache

    return growing_cache(model.config)


@contextlib.contextmanager
def continuous_batching(model: Any) -> Iterator[Any]:
    """Within it, transformers' ``model.generate_batch(prompts)`` runs on our kernels, without a mask.

    The model's attention has another name meanwhile, under which it does nothing but that; see :mod:`.hugging_face.paged`.

    Raises:
        ImportError: transformers has another kind of continuous batching, or none; 5.23 has this one.
        ValueError: the model computes attention in code of its own.
    """
    try:
        from transformers import AttentionInterface, PreTrainedModel
        from transformers.generation.continuous_batching import cache_allocators  # noqa: F401  what 5.23 has

        from .hugging_face import models, paged
    except ImportError as error:
        raise ImportError(
            "pytransformer: continuous_batching needs transformers >= 5.23; update it, or use Batcher"
        ) from error
    AttentionInterface.register(paged.NAME, paged.paged_attention_forward)
    models.check(model)
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = paged.NAME
        yield model
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
