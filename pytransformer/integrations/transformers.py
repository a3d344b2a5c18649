"""Hugging Face transformers: ``register()``, then ``attn_implementation="pytransformer"``."""

from __future__ import annotations

NAME = "pytransformer"


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` mean this package, in every model that uses transformers' attention interface.

    Registers both the attention and the mask that goes with it (:mod:`pytransformer.integrations.hugging_face`). Idempotent;
    never done on import. ``model.set_attn_implementation("pytransformer")`` switches a built model.

    Raises:
        ImportError: transformers is not installed, or too old to have the interfaces.
    """
    found = "it is not installed"
    try:
        import transformers

        found = f"this is {transformers.__version__}"
        from transformers import AttentionInterface, AttentionMaskInterface

        from . import hugging_face
    except ImportError as error:
        raise ImportError(
            f"pytransformer: attn_implementation={name!r} needs transformers >= 5.17, and {found}: "
            'pip install "pytransformer-kernels[hf]"'
        ) from error
    AttentionInterface.register(name, hugging_face.attention_forward)
    AttentionMaskInterface.register(name, hugging_face.attention_mask)
