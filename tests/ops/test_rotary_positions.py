# SPDX-License-Identifier: Apache-2.0
"""RotaryPositions has the frequencies of transformers' default configurations, or raises.

The bits are equal for every configuration with rotary positions.
"""

from __future__ import annotations

import importlib
import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pytransformer as pt

SAMPLE = 30  # sampled from about 600 model types; the full sweep takes 30 s
# Models that build their tables inside other modules.
WITHOUT_A_CLASS = {
    "CodeGenConfig": 64,
    "GPTJConfig": 64,
    "InternLM3Config": 128,
    "IQuestCoderConfig": 128,
}
read = pt.RotaryPositions.from_hugging_face


def configurations(count: int | None = None) -> list[Any]:
    """Yield a default configuration per class, of all model types or a sample, nested ones too."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[type, Any] = {}
    names = sorted(CONFIG_MAPPING.keys())
    for name in names if count is None else random.Random(0).sample(names, count):
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # needs arguments or a package
            continue
        for one in (config, *vars(config).values()):
            if isinstance(one, transformers.PretrainedConfig):
                found.setdefault(type(one), one)
    return list(found.values())


def frequencies_of_the_model(config: Any, layer_type: str | None) -> list[torch.Tensor]:
    """Return the frequencies of the matching rotary classes in the modeling file."""
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    found = []
    for name, embedding in vars(module).items():
        if (
            inspect.isclass(embedding)
            and name.endswith("RotaryEmbedding")
            and embedding.__module__ == module.__name__
        ):
            try:
                built = embedding(config)
            except (
                TypeError,
                AttributeError,
                KeyError,
                ValueError,
            ):  # belongs to another part of the model
                continue
            found.append(
                getattr(built, f"{layer_type}_inv_freq" if layer_type else "inv_freq", None)
            )
    return [f for f in found if f is not None]


def compare(configs: list[Any]) -> int:
    """Return the number of layer types with the model's frequencies; all others raise."""
    equal = 0
    for config in configs:
        parameters = getattr(config, "rope_parameters", None) or {}
        for layer_type in [key for key, value in parameters.items() if isinstance(value, dict)] or [
            None
        ]:
            name = type(config).__name__
            try:
                ours = read(config, layer_type=layer_type)
            except ValueError:
                continue
            if name in WITHOUT_A_CLASS:
                assert ours == pt.RotaryPositions(WITHOUT_A_CLASS[name]), name
                continue
            theirs = frequencies_of_the_model(config, layer_type)
            assert any(torch.equal(ours.frequencies(), f.float()) for f in theirs), (
                name,
                layer_type,
                ours,
            )
            equal += 1
    return equal


def test_sampled_configurations_have_the_frequencies_of_their_models() -> None:
    assert compare(configurations(SAMPLE)) > SAMPLE // 10


@pytest.mark.slow
def test_all_configurations_have_the_frequencies_of_their_models() -> None:
    assert compare(configurations()) > 180


@pytest.mark.parametrize("alpha", [1000.0, 1.5])
def test_fixed_alpha_equals_hunyuan(alpha: float) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": alpha, "factor": 1.0}
    config = transformers.HunYuanDenseV1Config(head_dim=128, rope_parameters=rope)
    assert all(
        torch.equal(read(config).frequencies(), f) for f in frequencies_of_the_model(config, None)
    )


def configuration(**fields: Any) -> Any:
    return SimpleNamespace(
        **{"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64} | fields
    )


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NESTED = {
    "full_attention": {"rope_theta": 1e6},
    "sliding_attention": {"rope_theta": 1e4},
    "conv": None,
}


@pytest.mark.parametrize(
    ("fields", "layer_type", "message"),
    [
        ({}, None, "must have rotary positions"),
        ({"rope_theta": 1e4, "position_embedding_type": "absolute"}, None,
            "position_embedding_type 'absolute'"),
        ({"rope_parameters": NESTED}, None,
            "layer_type must be one of 'full_attention', 'sliding_attention'"),
        ({"rope_parameters": NESTED}, "conv", "layer_type must be one of .*got 'conv'"),
        ({"rope_theta": 1e4}, "full_attention", "layer_type must be None"),
        ({"rope_parameters": {"rope_theta": 1e4, "speed": 2}}, None, "not read here, got 'speed'"),
        ({"rope_parameters": LLAMA_3 | {"low_freq_factor": 1.0, "beta_fast": 3}}, None,
            "got 'beta_fast'"),
        ({"rope_parameters": LLAMA_3}, None, "rope_type 'llama3' needs 'low_freq_factor'"),
        ({"rope_theta": 1e4, "layer_rope_theta": [1e4, 1e5]}, None, "got 'layer_rope_theta'"),
        ({"rope_theta": 1e4, "patch_size": 16}, None, "a SimpleNamespace of images"),
        ({"rope_theta": 1e4, "hidden_size": None}, None, "must have head_dim or hidden_size"),
        ({"rope_scaling": {"type": "longrope"}}, None, "rope_type 'longrope' is not known"),
    ],
)  # fmt: skip
def test_unsupported_configurations_raise(
    fields: dict[str, Any], layer_type: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(configuration(**fields), layer_type=layer_type)


def test_layer_types_and_old_fields_are_supported() -> None:
    assert read(
        configuration(rope_parameters=NESTED), layer_type="full_attention"
    ) == pt.RotaryPositions(16, 1e6)
    assert read(configuration(rotary_dim=8)) == pt.RotaryPositions(8)
    unused = {"rope_type": "default", "rope_theta": 1e4, "factor": None}
    assert read(configuration(rope_parameters=unused)) == pt.RotaryPositions(16)


UNREAD = {
    "linear": {"original_length": 8, "beta_fast": 2.0},
    "dynamic": {"attention_factor": 2.0, "low_frequency_factor": 2.0},
    "llama3": {"truncate": False, "beta_slow": 2.0},
    "yarn": {"high_frequency_factor": 8.0},
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in UNREAD for name in UNREAD[kind]]
)
def test_fields_of_another_scaling_type_raise(kind: Any, name: str) -> None:
    length = {} if kind == "linear" else {"original_length": 32}
    with pytest.raises(ValueError, match=f"{name} must be left out with kind '{kind}'"):
        pt.RotaryScaling(kind, 2.0, **length | {name: UNREAD[kind][name]})


def test_huge_and_tiny_dims_raise() -> None:
    for dims in (2**31 - 2, 65538):
        with pytest.raises(ValueError, match="dims must be an even int from 2 to 65,536"):
            pt.RotaryPositions(dims)
    with pytest.raises(ValueError, match="dims must be at least 4 with dynamic scaling"):
        pt.RotaryPositions(2, scaling=pt.RotaryScaling("dynamic", 2.0, 16))
    with pytest.raises(ValueError, match="dims must be an even number from 2"):
        pt.rotary(torch.zeros(0, 1, 1, 8), torch.zeros(0, 1, dtype=torch.int64), dims=2**31 - 2)


def test_numpy_numbers_give_equal_positions() -> None:
    numpy = pytest.importorskip("numpy", reason="needs NumPy")
    found = pt.RotaryPositions(numpy.int64(8), numpy.float32(500.0))
    assert (
        found == pt.RotaryPositions(8, 500.0)
        and type(found.dims) is int
        and type(found.base) is float
    )
