"""Encoder and decoder models on the fused ops: frozen configs, presets, weights from Hugging Face, safetensors."""

from ._base import Model
from ._output import Output
from .gpt import GPT, GPTConfig
from .transformer import Transformer, TransformerConfig

__all__ = ["GPT", "GPTConfig", "Model", "Output", "Transformer", "TransformerConfig"]
