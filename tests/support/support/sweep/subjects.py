# SPDX-License-Identifier: Apache-2.0
"""The model classes of a model type, built with random weights under which attention matters."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .configs import tiny
from .corrections import CLASSES

# Heads that generate come first, then those that read every hidden state.
MAPPINGS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_MULTIMODAL_LM",
    "MODEL_FOR_MASKED_LM", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_TEXT_TO_WAVEFORM",
    "MODEL_FOR_PRETRAINING", "MODEL_FOR_CTC",
    "MODEL",
)  # fmt: skip
GAIN, SMALL, NOISE = 3.0, 0.05, 0.1
MOST_PARAMETERS = 20_000_000


@dataclass(frozen=True)
class Subject:
    """A model class with a tiny config."""

    model_class: Any
    config: Any

    @property
    def name(self) -> str:
        return f"{self.config.model_type}/{self.model_class.__name__}" + (
            ", decoder" if is_decoder(self) else ""
        )

    def parameters(self) -> int:
        """Return the parameter count without building; an unshrunk config has billions."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.model_class(copy.deepcopy(self.config)).parameters())

    def build(self, implementation: str) -> Any:
        """Return the model in eval mode, with the same weights each time.

        Weights near 0.02, which barely affect attention scores, are tripled. Zeros, which hide
        their factors, and uninitialized parameters (the experts of Qwen3-Omni's talker) are filled.
        """
        torch.manual_seed(7)
        with nan_where_uninitialised():
            model = self.model_class._from_config(
                copy.deepcopy(self.config), attn_implementation=implementation
            )
        return stirred(model)


def stirred(model: Any) -> Any:
    """Return the model in float32 and eval mode, with fixed weights that make attention matter."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in {id(p): p for p in model.parameters()}.values():
            if not p.is_floating_point():
                continue
            noise = torch.randn(p.shape, generator=generator).to(p.dtype)
            if p.isnan().any():
                p.copy_(NOISE * noise)
            elif p.dim() < 2 or not p.any():
                p.add_(NOISE * noise)
            elif p.std() < SMALL:
                p.mul_(GAIN)
    return model.float().eval()


@contextmanager
def nan_where_uninitialised() -> Iterator[None]:
    """Fill memory from torch.empty with NaN."""
    before, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    # With fill_uninitialized_memory, which is on by default.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def is_decoder(subject: Subject) -> bool:
    return (
        getattr(subject.config, "is_decoder", False) is True
        and not subject.config.is_encoder_decoder
    )


def model_types() -> list[str]:
    """Return the sorted model types of the installed transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def config_class_of(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def classes_of(config_class: Any) -> list[Any]:
    """Return the public model classes of a config, the most informative first."""
    from transformers.models.auto import modeling_auto

    found = []
    for class_ in public_classes(config_class):
        if class_.config_class is config_class and not inspect.isabstract(class_):
            found.append(class_)
    names = [
        getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").get(config_class.model_type)
        for mapping in MAPPINGS
    ]
    names.insert(0, CLASSES.get(config_class.model_type))
    order = [
        name for given in names for name in (given if isinstance(given, (list, tuple)) else [given])
    ]
    return sorted(
        found, key=lambda c: order.index(c.__name__) if c.__name__ in order else len(order)
    )


def public_classes(config_class: Any) -> Iterator[Any]:
    from transformers import PreTrainedModel

    folder, _, file = config_class.__module__.rpartition(".")
    module = importlib.import_module(f"{folder}.{file.replace('configuration_', 'modeling_')}")
    for name in getattr(module, "__all__", ()):
        class_ = getattr(module, name)
        if (
            isinstance(class_, type)
            and issubclass(class_, PreTrainedModel)
            and not name.endswith("PreTrainedModel")
        ):
            yield class_


def subjects(model_type: str) -> list[Subject]:
    """Return the model type's first class, and the same as a decoder if an encoder supports it."""
    config_class = config_class_of(model_type)
    classes = classes_of(config_class)
    if not classes:
        return []
    found = [Subject(classes[0], tiny(config_class))]
    causal = [c for c in classes if c.__name__.endswith(("ForCausalLM", "LMHeadModel"))]
    if (
        causal
        and getattr(found[0].config, "is_decoder", None) is False
        and not found[0].config.is_encoder_decoder
    ):
        found.append(Subject(causal[0], tiny(config_class, is_decoder=True)))
    return found
