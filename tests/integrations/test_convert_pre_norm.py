# SPDX-License-Identifier: Apache-2.0
"""Whole layers with a norm before each part in two calls of C++, or by their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.integrations.convert import pre_norm_rules as rules
from pytransformer.ops._core import fast_path
from support.hugging_face import distance, model_distance_limit
from support.paths import needs_fast_path

LAYERS = 2
LIMIT = model_distance_limit(torch.float32)
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 48},
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "vit": {},
    "deit": {},
    "clip_vision_model": {"hidden_act": "gelu"},
    "clip_text_model": {"hidden_act": "gelu"},
    "siglip_vision_model": {},
}
MODELS = DECODERS | ENCODERS


def build(name: str, attention: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    settings = dict(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, max_position_embeddings=90, image_size=24, patch_size=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_implementation=attention,
    )  # fmt: skip
    config = AutoConfig.for_model(name, **{**settings, **MODELS[name], **more})
    torch.manual_seed(3)
    auto = AutoModelForCausalLM if name in DECODERS else AutoModel
    model = auto.from_config(config).eval()
    for n, p in model.named_parameters():
        if "norm" in n or "ln_" in n or "bias" in n:  # else ones and zeros
            torch.nn.init.uniform_(p, -1, 1)
    return model


def converted(name: str, **more: Any) -> Any:
    model = build(name, "pytransformer", **more)
    pt.integrations.convert(model)
    return model


def layers(model: Any) -> Any:
    by_path = dict(model.named_modules())
    (found,) = (
        by_path[path]
        for path in ("transformer.h", "model.layers", "layers", "encoder.layers")
        if path in by_path
    )
    return found


def batch(length: int = 9) -> dict[str, torch.Tensor]:
    """Two sequences, the second with padding at its start."""
    ids = 3 + torch.arange(2 * length).view(2, length) % 47
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, : length // 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def given(model: Any, length: int = 9) -> dict[str, torch.Tensor]:
    """Return the arguments of a forward pass."""
    if model.main_input_name == "pixel_values":
        torch.manual_seed(length)
        return {"pixel_values": torch.randn(2, 3, 24, 24, dtype=model.dtype)}
    return batch(length)


def attention_of(layer: Any) -> Any:
    children = dict(layer.named_children())
    return next(children[n] for n in ("attn", "self_attn", "attention") if n in children)


def run(model: Any, inputs: dict[str, torch.Tensor], tokens: int = 3) -> list[torch.Tensor]:
    """Return a decoder's logits of the prompt, of further tokens and without a cache.

    An encoder has one output.
    """
    with torch.no_grad():
        if not hasattr(model, "lm_head"):
            out = model(**inputs).last_hidden_state
            return [out[inputs["attention_mask"].bool()] if "attention_mask" in inputs else out] * 2
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        visible = mask.bool()
        logits, cache, new = [], None, ids
        for step in range(tokens):
            out = model(new, attention_mask=mask, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits if step else out.logits[visible])
            new = torch.full((2, 1 + step), 5)  # one token, then two
            mask = torch.cat((mask, torch.ones_like(new)), 1)
        logits.append(model(**inputs, use_cache=False).logits[visible])
    return logits


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Collect whether C++ took each layer."""
    found: list[bool] = []
    own = rules._in_two_calls

    def spied(*arguments: Any) -> Any:
        out = own(*arguments)
        found.append(out is not None)
        return out

    monkeypatch.setattr(rules, "_in_two_calls", spied)
    return found


def refuse(*_: Any) -> Any:
    return NotImplemented


@needs_fast_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 9, 75], ids=lambda n: f"{n} tokens")
@pytest.mark.parametrize("name", MODELS)
def test_two_calls_have_the_bits_of_the_modules(
    hugging_face: Any, name: str, length: int, dtype: torch.dtype, calls: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = converted(name).to(dtype)
    inputs = given(model, length)
    found = run(model, inputs)
    each = (4 if name in DECODERS else 1) * LAYERS
    assert calls == [True] * each
    for entry in ("pre_norm_rest", "pre_norm_heads"):  # after the update of the cache, and before
        monkeypatch.setattr(fast_path.entries, entry, refuse)
        for a, b in zip(found, run(model, inputs)):
            assert torch.equal(a, b)
    assert calls[each:] == [True] * each + [False] * each


@needs_fast_path
@pytest.mark.parametrize("name", MODELS)
def test_two_calls_equal_eager(hugging_face: Any, name: str, calls: list[bool]) -> None:
    ours, plain = converted(name), build(name, "eager")
    for found, expected in zip(run(ours, given(ours)), run(plain, given(plain))):
        assert distance(found, expected) < LIMIT
    assert calls and all(calls)


@needs_fast_path
@pytest.mark.parametrize("name", MODELS)
def test_other_calls_run_the_modules(hugging_face: Any, name: str, calls: list[bool]) -> None:
    """With gradients, dropout, another backend, hooks, or an inner module that is not converted."""
    model = converted(name)
    inputs = given(model)
    model(**inputs)
    assert not any(calls)

    def without_gradient() -> list[bool]:
        calls.clear()
        with torch.no_grad():
            model(**inputs)
        return list(calls)

    assert without_gradient() == [True, True]
    with pt.use_backend(attention="reference"):
        assert not any(without_gradient())
    layer = layers(model)[1]
    attend = attention_of(layer)
    for module in (attend, layer.mlp, next(layer.mlp.children())):
        hook = module.register_forward_hook(lambda *_: None)
        assert without_gradient() == [True, False]
        hook.remove()
    assert without_gradient() == [True, True]
    for where in ("attn_dropout", "resid_dropout", "attention_dropout", "dropout"):
        for module in (attend, layer):
            dropout = getattr(module, where, None)
            if isinstance(dropout, torch.nn.Dropout):
                dropout.train().p = 0.5
                assert without_gradient() == [True, False]
                dropout.eval().p = 0.0
            elif dropout is not None:
                setattr(module.train(), where, 0.5)
                assert without_gradient() == [True, False]
                setattr(module.eval(), where, dropout)
    assert without_gradient() == [True, True]
    for kinds, taken in (
        (("block",), False),
        (("block", "norm", "attention", "feed_forward"), True),
    ):
        model = build(name, "pytransformer")
        pt.integrations.convert(model, kinds=kinds)
        assert without_gradient() == [taken] * LAYERS
    model = build(name, "sdpa")
    pt.integrations.convert(model)
    assert not any(without_gradient())


def _modules(layer: Any) -> list[str]:
    return [
        n for n, m in layer.named_modules() if next(m.parameters(recurse=False), None) is not None
    ]


def _replace(layer: Any, name: str) -> None:
    """Replace an inner module by one of its class with other weights."""
    old = layer.get_submodule(name)
    new = type(old).__new__(type(old))
    new.__dict__.update(old.__dict__)
    new._parameters = {
        n: None if p is None else torch.nn.Parameter(torch.rand_like(p) * 2 - 1)
        for n, p in old._parameters.items()
    }
    parent, _, attribute = name.rpartition(".")
    layer.get_submodule(parent)._modules[attribute] = new


@pytest.mark.parametrize("name", MODELS)
def test_a_change_after_a_call_takes_effect(hugging_face: Any, name: str) -> None:
    """Every inner module, setting and parameter counts at the next call."""
    changes: dict[str, Callable[[Any], None]] = {
        inner: lambda layer, inner=inner: _replace(layer, inner)
        for inner in _modules(layers(build(name, "eager"))[-1])
    }
    example = layers(build(name, "eager"))[-1]
    scaling = "scale" if hasattr(attention_of(example), "scale") else "scaling"
    changes["scaling"] = lambda layer: setattr(attention_of(layer), scaling, 2.0)
    (activation,) = (n for n in ("act", "act_fn", "activation_fn") if hasattr(example.mlp, n))
    changes["activation"] = lambda layer: setattr(layer.mlp, activation, torch.nn.ReLU())
    for inner, module in example.named_modules():
        for eps in ("eps", "variance_epsilon"):
            if hasattr(module, eps):
                changes[f"{eps} of {inner}"] = lambda layer, inner=inner, eps=eps: setattr(
                    layer.get_submodule(inner), eps, 20.0
                )
    for what, change in changes.items():
        plain, ours = build(name, "eager"), converted(name)
        for model in (plain, ours):
            for parameter in layers(model)[-1].parameters():
                parameter.data.mul_(3)  # so that each change moves the result
        inputs = given(ours)
        before = run(ours, inputs)
        for model in (plain, ours):
            torch.manual_seed(7)
            change(layers(model)[-1])
        for old, found, expected in zip(before, run(ours, inputs), run(plain, inputs)):
            assert distance(found, expected) < LIMIT, what
            assert distance(old, expected) > 10 * LIMIT, what


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_other_shapes_have_the_outcome_of_eager(hugging_face: Any, name: str) -> None:
    """Or they are an error; never a wrong read."""

    def outcome(attention: str, inner: str, part: str, shape: list[int]) -> torch.Tensor | None:
        model = build(name, "eager") if attention == "eager" else converted(name)
        module = layers(model)[0].get_submodule(inner)
        setattr(module, part, torch.nn.Parameter(torch.full(shape, 0.5)))
        try:
            return run(model, given(model), 2)[1]
        except (RuntimeError, ValueError):
            return None

    layer = layers(build(name, "eager"))[0]
    for inner in _modules(layer):
        for part, p in layer.get_submodule(inner).named_parameters(recurse=False):
            old = list(p.shape)
            for shape in ([n + 1 for n in old], [n - 1 for n in old], old[1:]):
                expected = outcome("eager", inner, part, shape)
                found = outcome("pytransformer", inner, part, shape)
                assert found is None or (
                    expected is not None and distance(found, expected) < LIMIT
                ), (inner, part, shape)


@pytest.mark.parametrize("name", ENCODERS)
def test_requested_outputs_equal_eager(hugging_face: Any, name: str) -> None:
    ours, plain = converted(name), build(name, "eager")
    more = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        found, expected = (model(**given(model), **more) for model in (ours, plain))
    rows = given(ours).get("attention_mask", torch.ones(2, found.hidden_states[0].shape[1])).bool()
    for outputs in ("attentions", "hidden_states"):
        assert len(found[outputs]) == len(expected[outputs])
        for a, b in zip(found[outputs], expected[outputs]):
            by_row = (a.transpose(1, 2), b.transpose(1, 2)) if a.dim() == 4 else (a, b)
            assert distance(*(t[rows] for t in by_row)) < LIMIT


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("which", ["static", "own class", "growing", "own mask", "attentions"])
def test_caches_masks_and_requested_outputs_equal_eager(
    hugging_face: Any, name: str, which: str
) -> None:
    from transformers import DynamicCache, StaticCache

    def outputs(model: Any) -> list[torch.Tensor]:
        length, more = 6, {}
        cache: Any = DynamicCache(config=model.config)
        if which == "static":
            cache = StaticCache(config=model.config, max_cache_len=20)
        if which == "own class":
            cache = type("Own", (DynamicCache,), {"update": DynamicCache.update})(
                config=model.config
            )
        if which == "growing" and model.config._attn_implementation == "pytransformer":
            cache = pt.integrations.transformers.growing_cache(model)
        if which == "attentions":
            more = {"output_attentions": True, "output_hidden_states": True}
        found = []
        ids = 3 + torch.arange(2 * length).view(2, length)
        with torch.no_grad():
            for start, new in ((0, ids), (length, ids[:, :1]), (length + 1, ids[:, :2])):
                if which == "own mask":
                    q, k = new.shape[1], start + new.shape[1]
                    visible = torch.ones(q, k, dtype=torch.bool).tril(start)
                    visible[:, 1] = False
                    low = torch.finfo(torch.float32).min
                    more = {
                        "attention_mask": torch.zeros(q, k).masked_fill(~visible, low)[None, None]
                    }
                    more["position_ids"] = torch.arange(start, k)[None]
                out = model(new, past_key_values=cache, use_cache=True, **more)
                found += [out.logits, *(out.attentions or ()), *(out.hidden_states or ())]
        return found

    # the user's mask is over all keys, and a window's cache drops some
    more = {"sliding_window": None} if which == "own mask" else {}
    ours, plain = converted(name, **more), build(name, "eager", **more)
    for found, expected in zip(outputs(ours), outputs(plain), strict=True):
        assert distance(found, expected) < LIMIT
