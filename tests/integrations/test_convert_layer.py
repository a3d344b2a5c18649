# SPDX-License-Identifier: Apache-2.0
"""Whole layers of BERT-like encoders: one forward that calls no inner module, or the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.integrations.convert import hugging_face_rules as rules
from pytransformer.ops._core import fast_path
from support.hugging_face import distance, model_distance_limit
from support.paths import needs_fast_path

MODELS = ("bert", "roberta", "xlm-roberta", "electra", "camembert")
LAYERS = 2
LIMIT = model_distance_limit(torch.float32)


def build(name: str, attention: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModel

    settings = dict(
        vocab_size=50, hidden_size=32, embedding_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=4, intermediate_size=48, max_position_embeddings=40, pad_token_id=0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    config = AutoConfig.for_model(name, **{**settings, **more})
    torch.manual_seed(3)
    return AutoModel.from_config(config).eval()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the products that whole layers compute, four each."""
    found: list[int] = []
    own = rules._project

    def project(x: torch.Tensor, layer: Any) -> torch.Tensor:
        found.append(1)
        return own(x, layer)

    monkeypatch.setattr(rules, "_project", project)
    return found


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(1, 19).view(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_layer_equals_eager_forward_and_backward(
    hugging_face: Any, name: str, products: list[int]
) -> None:
    plain, ours = build(name, "eager"), build(name, "pytransformer")
    pt.integrations.convert(ours)
    inputs = batch()
    visible = inputs["attention_mask"].bool()
    for mode in (False, True):
        found, expected = (
            model.train(mode)(**inputs).last_hidden_state[visible] for model in (ours, plain)
        )
        assert distance(found, expected) < LIMIT
    assert len(products) == 2 * 4 * LAYERS
    for out in (found, expected):
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    expected_of = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    grads = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert grads.keys() == expected_of.keys()
    grads = {n: g for n, g in grads.items() if "key.bias" not in n}  # zero but for rounding
    far = {n: d for n, g in grads.items() if not (d := distance(g, expected_of[n])) < LIMIT}
    assert not far


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Collect whether C++ took each layer without gradient, in one call."""
    found: list[bool] = []
    own = fast_path.entries.post_norm_layer

    def entry(*arguments: Any) -> Any:
        out = own(*arguments)
        found.append(out is not NotImplemented)
        return out

    monkeypatch.setattr(fast_path.entries, "post_norm_layer", entry)
    return found


@needs_fast_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 9, 75], ids=lambda n: f"{n} tokens")
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "padding"])
@pytest.mark.parametrize("name", ["bert", "electra"])
def test_one_call_has_the_bits_of_several(
    hugging_face: Any,
    name: str,
    masked: bool,
    length: int,
    dtype: torch.dtype,
    calls: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activation = "gelu" if name == "bert" else "silu"
    more = {"max_position_embeddings": 80, "hidden_act": activation}
    model = build(name, "pytransformer", **more).to(dtype)
    model.encoder.layer[0].output.LayerNorm.eps = 0.5
    pt.integrations.convert(model)
    ids = 1 + torch.arange(3 * length).view(3, length) % 49
    mask = torch.ones_like(ids)
    if masked:
        mask[1, (length + 1) // 2 :] = 0
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert calls == [True] * LAYERS
        monkeypatch.setattr(fast_path.entries, "post_norm_layer", lambda *_: NotImplemented)
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(found, expected)


@needs_fast_path
def test_one_call_needs_no_gradient_and_no_dropout(hugging_face: Any, calls: list[bool]) -> None:
    model = build("bert", "pytransformer")
    pt.integrations.convert(model)
    model(**batch())
    assert not calls
    with torch.no_grad():
        model(**batch())
        assert calls == [True] * LAYERS
        for dropout in (
            model.encoder.layer[1].attention.output.dropout,
            model.encoder.layer[1].output.dropout,
        ):
            calls.clear()
            dropout.train().p = 0.5
            model(**batch())
            assert calls == [True] * (LAYERS - 1)
            dropout.eval()
        calls.clear()
        with pt.use_backend(attention="reference"):
            model(**batch())
        assert True not in calls


INNER = (
    "attention.self.query", "attention.self.key", "attention.self.value",
    "attention.output.dense", "attention.output.LayerNorm", "intermediate.dense",
    "output.dense", "output.LayerNorm",
)  # fmt: skip


def _replace(name: str) -> Callable[[Any], None]:
    """Return a change that replaces an inner module by one with other weights."""

    def change(layer: Any) -> None:
        parent, _, attribute = name.rpartition(".")
        old = layer.get_submodule(name)
        new = torch.nn.LayerNorm(32) if name.endswith("Norm") else torch.nn.Linear(
            old.in_features, old.out_features
        )  # fmt: skip
        torch.manual_seed(7)
        for parameter in new.parameters():
            torch.nn.init.uniform_(parameter, -1, 1)
        setattr(layer.get_submodule(parent), attribute, new.eval())

    return change


CHANGES: dict[str, Callable[[Any], None]] = {name: _replace(name) for name in INNER} | {
    "scaling": lambda layer: setattr(layer.attention.self, "scaling", 2.0),
    "activation": lambda layer: setattr(layer.intermediate, "intermediate_act_fn", torch.nn.SiLU()),
    "first eps": lambda layer: setattr(layer.attention.output.LayerNorm, "eps", 0.5),
    "last eps": lambda layer: setattr(layer.output.LayerNorm, "eps", 0.5),
    "attention's dropout": lambda layer: setattr(layer.attention.self.train().dropout, "p", 1.0),
    "output's dropout": lambda layer: layer.output.dropout.train().__setattr__("p", 1.0),
    "chunks": lambda layer: setattr(layer, "chunk_size_feed_forward", 3),
    "attention": lambda layer: setattr(layer.attention.self.config, "_attn_implementation", "sdpa"),
}


@needs_fast_path
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_after_a_call_takes_effect(
    hugging_face: Any, change: Callable[[Any], None]
) -> None:
    """A layer remembers what a call reads of its modules, until they change."""
    plain, ours = build("bert", "eager"), build("bert", "pytransformer")
    for model in (plain, ours):
        for parameter in model.encoder.layer[-1].parameters():
            parameter.data.mul_(5)  # so that each change moves the result
    pt.integrations.convert(ours)
    with torch.no_grad():
        before = ours(**batch()).last_hidden_state[0]
        for model in (plain, ours):
            change(model.encoder.layer[-1])
        found, expected = (model(**batch()).last_hidden_state[0] for model in (ours, plain))
    assert distance(found, expected) < LIMIT
    moved = distance(before, expected) > 10 * LIMIT
    assert moved or change in (CHANGES["chunks"], CHANGES["attention"])


@needs_fast_path
@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("inner", INNER)
def test_parameters_of_other_shapes_have_the_outcome_of_eager(
    hugging_face: Any, inner: str, part: str
) -> None:
    """Or they are an error, as a bias of the network without dimensions; never a wrong read."""

    def outcome(attention: str, shape: list[int]) -> torch.Tensor | None:
        model = build("bert", attention)
        if attention != "eager":
            pt.integrations.convert(model)
        module = model.encoder.layer[0].get_submodule(inner)
        setattr(module, part, torch.nn.Parameter(torch.full(shape, 0.5)))
        try:
            with torch.no_grad():
                found: torch.Tensor = model(**batch()).last_hidden_state[0]
        except (RuntimeError, ValueError):
            return None
        return found

    old = list(getattr(build("bert", "eager").encoder.layer[0].get_submodule(inner), part).shape)
    for shape in ([n + 1 for n in old], [n - 1 for n in old], old[1:]):
        expected, found = outcome("eager", shape), outcome("pytransformer", shape)
        assert found is None or (expected is not None and distance(found, expected) < LIMIT)


@pytest.mark.parametrize(
    "keywords", [{"output_attentions": True}, {"output_hidden_states": True}], ids=str
)
def test_requested_outputs_equal_eager(
    hugging_face: Any, keywords: dict[str, bool], products: list[int]
) -> None:
    plain, ours = build("bert", "eager"), build("bert", "pytransformer")
    pt.integrations.convert(ours)
    with torch.no_grad():
        found, expected = (model(**batch(), **keywords) for model in (ours, plain))
    attentions = "output_attentions" in keywords
    name = "attentions" if attentions else "hidden_states"
    assert len(found[name]) == LAYERS + (not attentions)
    assert all(distance(a[0], b[0]) < LIMIT for a, b in zip(found[name], expected[name]))
    assert not products  # transformers collects them with hooks on inner modules


def test_other_calls_run_the_original(hugging_face: Any, products: list[int]) -> None:
    """Another attention, chunks of the network, cross-attention and caches."""
    inputs = batch()
    decoder = {"is_decoder": True, "add_cross_attention": True}
    memory = {"encoder_hidden_states": torch.randn(2, 5, 32)}
    for attention, more, keywords in (
        ("sdpa", {}, {}),
        ("pytransformer", {"chunk_size_feed_forward": 3}, {}),
        ("pytransformer", decoder, memory),
        ("pytransformer", {"is_decoder": True}, {"use_cache": True}),
    ):
        plain, ours = build("bert", "eager", **more), build("bert", attention, **more)
        pt.integrations.convert(ours)
        with torch.no_grad():
            found, expected = (m(**inputs, **keywords).last_hidden_state for m in (ours, plain))
        assert distance(found[0], expected[0]) < LIMIT
        assert not products


def test_adapters_leave_the_network_fused(hugging_face: Any, products: list[int]) -> None:
    """A wrapped projection ends the whole layer, but not the rule of its network."""

    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * self.inner(x)

    plain, ours = build("bert", "eager"), build("bert", "pytransformer")
    for model in (plain, ours):
        for layer in model.encoder.layer:
            layer.attention.self.query = Wrapped(layer.attention.self.query)
    report = pt.integrations.convert(ours)
    assert ("encoder.layer.0", "BertLayer", "feed_forward and add_norm") in report.converted
    with torch.no_grad():
        found, expected = (m(**batch()).last_hidden_state[0] for m in (ours, plain))
    assert distance(found, expected) < LIMIT and not products
    reason = "runs its original forward: it has a Wrapped where a torch.nn.Linear was expected"
    assert reason in str(pt.explain(ours, batch()))


def test_linear_layers_stay_pytorchs_unless_converted(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    monkeypatch.setattr(
        rules, "linear", lambda *a: called.append(1) or torch.nn.functional.linear(*a)
    )
    for kinds, count in ((("block", "norm"), 0), (("block", "norm", "linear"), 4 * LAYERS)):
        model = build("bert", "pytransformer")
        pt.integrations.convert(model, kinds=kinds)
        called.clear()
        model(**batch())
        assert len(called) == count
