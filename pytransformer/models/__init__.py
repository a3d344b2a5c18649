# SPDX-License-Identifier: Apache-2.0
"""Encoder and decoder models on the fused ops: presets, Hugging Face weights, safetensors."""

from ._base import Model
from ._output import Output
from ._parameters import ParameterTable
from .bert import BERT, BERTConfig
from .conformer import Conformer, ConformerConfig
from .fnet import FNet, FNetConfig
from .generation import Decoding, Generated, generate
from .gpt import GPT, GPTConfig
from .mixer import Mixer, MixerConfig
from .serving import Batcher, Finished
from .t5 import T5, T5Config
from .transformer import Transformer, TransformerConfig
from .vit import ViT, ViTConfig

__all__ = [
    "BERT",
    "GPT",
    "T5",
    "BERTConfig",
    "Batcher",
    "Conformer",
    "ConformerConfig",
    "Decoding",
    "FNet",
    "FNetConfig",
    "Finished",
    "GPTConfig",
    "Generated",
    "Mixer",
    "MixerConfig",
    "Model",
    "Output",
    "ParameterTable",
    "T5Config",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTConfig",
    "generate",
]
