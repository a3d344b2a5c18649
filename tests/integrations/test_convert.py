# SPDX-License-Identifier: Apache-2.0
"""convert(): converted Hugging Face models against their eager code."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pytransformer as pt
from pytransformer.ops._backends.cpu import linear as cpu
from pytransformer.ops._core import fast_path
from pytransformer.ops._core.registry import trace
from support.hugging_face import (
    FAMILIES,
    Family,
    distance,
    flat,
    inputs_of,
    model_distance_limit,
    real_tokens,
    run,
)

PADDED = [
    (name, padding)
    for name, f in FAMILIES.items()
    for padding in (["none"] if f.kind in ("image", "audio") else ["none", "left", "right"])
]
GENERATIVE = [name for name, f in FAMILIES.items() if f.kind in ("decoder", "seq2seq")]
LIMIT = model_distance_limit(torch.float32)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")


def converted(family: Family) -> nn.Module:
    model = family.build("pytransformer")
    conversion = pt.integrations.convert(model)
    assert conversion.converted
    return model


@pytest.mark.parametrize(("name", "padding"), PADDED)
def test_outputs_and_gradients_equal_eager(hugging_face: Any, name: str, padding: str) -> None:
    family = FAMILIES[name]
    inputs = inputs_of(family, padding)
    eager = family.build("eager")
    logits, grads = run(eager, family, inputs)
    model = converted(family)
    ours, our_grads = run(model, family, inputs)
    assert distance(ours, logits) < LIMIT
    assert our_grads.keys() == grads.keys()
    assert distance(flat(our_grads), flat(grads)) < LIMIT
    for n, g in grads.items():
        if "relative_attention_bias" in n:
            assert g.norm() > 0
            assert distance(our_grads[n], g) < LIMIT
    assert list(model.state_dict()) == list(eager.state_dict())


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("name", GENERATIVE)
def test_generation_equals_eager(hugging_face: Any, name: str, cache: str | None) -> None:
    family = FAMILIES[name]
    inputs = {k: v for k, v in inputs_of(family, "left").items() if not k.startswith("decoder_")}
    settings = dict(max_new_tokens=7, do_sample=False, use_cache=cache is not None)
    if cache == "static":
        settings.update(cache_implementation="static", disable_compile=True)
    tokens = family.build("eager").generate(**inputs, **settings)
    assert torch.equal(converted(family).generate(**inputs, **settings), tokens)


DROPS = ["bert", "gpt2", "t5", "t5-gated", "bart", "marian", "whisper", "vit"]


def dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the places of a model's dropout probabilities."""
    names = ("dropout", "activation_dropout", "attention_dropout")
    return [
        (m, n)
        for m in model.modules()
        for n in (("p",) if isinstance(m, nn.Dropout) else names)
        if isinstance(getattr(m, n, None), float)
    ]


@pytest.mark.parametrize("name", DROPS)
def test_every_dropout_applies_where_eager_applies_it(hugging_face: Any, name: str) -> None:
    """Dropout with probability 1 is deterministic; each place is tested alone."""
    family = FAMILIES[name]
    inputs = inputs_of(family, "none")
    models = [family.build("eager").train(), converted(family).train()]
    if hasattr(models[0].config, "apply_spec_augment"):
        for model in models:
            model.config.apply_spec_augment = False
    places = [dropouts(model) for model in models]
    assert len(places[0]) == len(places[1]) >= 5
    compared = 0
    for i in range(len(places[0])):
        for of_model in places:
            for j, (module, attribute) in enumerate(of_model):
                setattr(module, attribute, float(i == j))
        (logits, grads), (ours, our_grads) = (run(model, family, inputs) for model in models)
        if logits.norm() > 0:  # the last dropout of T5's stack leaves nothing
            compared += 1
            assert distance(ours, logits) < LIMIT, places[0][i]
            assert distance(flat(our_grads), flat(grads)) < LIMIT, places[0][i]
        else:
            assert ours.norm() == 0
    assert compared >= len(places[0]) - 2


def test_converted_layers_run_fused_ops(hugging_face: Any) -> None:
    """A BERT layer is one attention, one network and two sums with their norms.

    Embeddings and head have norms.
    """
    family = FAMILIES["bert"]
    model = converted(family)
    with torch.no_grad(), trace() as ran:
        model(**inputs_of(family, "right"))
    layer = ["attention_fwd", "add_norm_fwd", "feed_forward_fwd", "add_norm_fwd"]
    assert [op for op, _ in ran] == ["layer_norm_fwd", *layer, *layer, "layer_norm_fwd"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_layers_of_gpt2_run_within_the_tables_rows(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Four products a layer and the vocabulary's in a step; PyTorch's with a gradient or more rows.

    Conv1D's weights are read in their own layout.
    """
    seen: list[tuple[int, ...]] = []
    run, limits = cpu.forward, cpu.MaxRows(cpu.FEW_ROWS, 0)
    monkeypatch.setattr(cpu, "faster", lambda: {dtype: limits})
    monkeypatch.setattr(
        cpu, "forward", lambda x, w, *rest: (seen.append(w.stride()), run(x, w, *rest))[1]
    )
    # The fast path would hide its calls.
    monkeypatch.setattr(fast_path.entries, "linear", lambda *given: NotImplemented)
    eager = FAMILIES["gpt2"].build("eager").to(dtype).eval()
    model = copy.deepcopy(eager)
    pt.integrations.convert(model, kinds=["linear"])
    ids = torch.arange(3, 15).view(1, 12)
    assert (
        torch.equal(model(input_ids=ids[:, :5]).logits, eager(input_ids=ids[:, :5]).logits)
        and not seen
    )
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, eager(input_ids=ids).logits) and not seen
        steps = [
            m(
                input_ids=ids[:, -1:], past_key_values=m(input_ids=ids[:, :-1]).past_key_values
            ).logits
            for m in (model, eager)
        ]
    assert distance(steps[0].float(), steps[1].float()) < model_distance_limit(dtype)
    conv1d = [m.weight.t().stride() for m in model.modules() if type(m).__name__ == "Conv1D"]
    assert len(conv1d) == 8 and seen == [*conv1d, model.lm_head.weight.stride()]


@pytest.mark.parametrize("masked", [False, True])
def test_t5_distances_after_a_cache_equal_eager(hugging_face: Any, masked: bool) -> None:
    """Distances count from the last key.

    Cases: one query after cached keys, several, and several under a user's mask.
    """
    family = FAMILIES["t5"]
    inputs = inputs_of(family, "none")
    ids = inputs["decoder_input_ids"]

    def logits(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            encoded = model.get_encoder()(input_ids=inputs["input_ids"])
            steps, past = [], None
            for start, stop in ((0, 3), (3, 4), (4, 6)):
                more = {}
                if masked and stop - start > 1:
                    more["decoder_attention_mask"] = additive[:, :, start:stop, :stop]
                out = model(
                    encoder_outputs=encoded,
                    decoder_input_ids=ids[:, start:stop],
                    past_key_values=past,
                    use_cache=True,
                    **more,
                )
                past = out.past_key_values
                steps.append(out.logits)
        return torch.cat(steps, 1)

    seen = torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    additive = torch.zeros(seen.shape).masked_fill(
        ~(seen | torch.eye(6, dtype=torch.bool)), torch.finfo(torch.float32).min
    )
    model = family.build("eager")
    gain = 4.0  # the table's effect is small at initialization
    twin = converted(family)
    for m in (model, twin):
        with torch.no_grad():
            for n, p in m.named_parameters():
                if "relative_attention_bias" in n:
                    p.mul_(gain)
    assert distance(logits(twin), logits(model)) < LIMIT


def test_t5_allocates_no_quadratic_tensor(hugging_face: Any) -> None:
    """At length 4,096 no tensor of forward and backward has as many elements as one head's scores.

    The unconverted model allocates one, shown at a shorter length.
    """
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.untyped_storage().nbytes() // t.element_size())
            return out

    family = FAMILIES["t5"]
    for build, length, quadratic in (
        (converted, 4096, False),
        (lambda f: f.build("pytransformer"), 512, True),
    ):
        ids = torch.randint(3, 50, (1, length), generator=torch.Generator().manual_seed(0))
        model, largest = build(family), 0
        with Sizes():
            model(input_ids=ids, decoder_input_ids=ids).logits.sum().backward()
        assert (largest >= length * length) == quadratic, largest


@pytest.mark.parametrize("name", ["bert", pytest.param("t5", marks=pytest.mark.slow)])
def test_compiles_and_exports_without_a_graph_break(hugging_face: Any, name: str) -> None:
    family = FAMILIES[name]
    inputs = inputs_of(family, "right")
    real = real_tokens(family, inputs)
    with torch.no_grad():
        logits = family.build("eager")(**inputs).logits[real]
        torch._dynamo.reset()
        model = converted(family)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert distance(compiled(**inputs).logits[real], logits) < LIMIT
        exported = torch.export.export(model, (), {**inputs, "use_cache": False}, strict=False)
        assert distance(exported.module()(**inputs, use_cache=False).logits[real], logits) < LIMIT


def test_revert_restores_everything(hugging_face: Any) -> None:
    family = FAMILIES["t5"]
    model = family.build("eager")
    before = [type(m) for m in model.modules()]
    conversion = pt.integrations.convert(model)
    assert [type(m) for m in model.modules()] != before
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), before))
    assert pt.integrations.convert(model).converted == []
    conversion.revert()
    assert [type(m) for m in model.modules()] == before


def test_copies_stay_converted(hugging_face: Any) -> None:
    family = FAMILIES["bert"]
    model = converted(family)
    inputs = inputs_of(family, "right")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(twin(**inputs).logits, model(**inputs).logits)


def test_kinds_select_the_converted_modules(hugging_face: Any) -> None:
    model = FAMILIES["bert"].build("eager")
    assert {what for _, _, what in pt.integrations.convert(model, kinds=["norm"]).converted} == {
        "layer_norm"
    }


def test_converted_t5_still_runs_on_other_implementations(hugging_face: Any) -> None:
    """The table is passed only to our attention function."""
    family = FAMILIES["t5"]
    inputs = inputs_of(family, "left")
    logits, _ = run(family.build("eager"), family, inputs)
    model = family.build("sdpa")
    pt.integrations.convert(model)
    assert distance(run(model, family, inputs)[0], logits) < LIMIT


# ---- modules left unchanged, and the reasons


def reasons(model: nn.Module) -> dict[str, str]:
    return {name: reason for name, _, reason in pt.integrations.convert(model).skipped}


def test_classes_of_the_same_name_are_not_converted() -> None:
    class LlamaRMSNorm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = nn.Sequential(LlamaRMSNorm())
    assert "convert does not support its class" in reasons(model)["0"]
    assert model(torch.ones(1)).item() == 2


def test_subclasses_are_not_converted() -> None:
    class Shifted(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    model = nn.Sequential(Shifted(4))
    assert pt.integrations.convert(model).converted == []


def test_changed_code_is_not_converted(hugging_face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.weight

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)
    skipped = reasons(FAMILIES["llama"].build("eager"))
    assert (
        "its forward, or what that calls, is not one we have checked: changed, or of another"
        " transformers" in skipped["model.norm"]
    )
    assert (
        "has a LlamaRMSNorm whose forward is not one we have checked" in skipped["model.layers.0"]
    )


@pytest.mark.parametrize(
    ("change", "where", "reason"),
    [
        (
            lambda m: setattr(
                m.bert.encoder.layer[0].intermediate, "intermediate_act_fn", nn.Tanh()
            ),
            "layer.0",
            "its activation, Tanh",
        ),
        (
            lambda m: m.bert.encoder.layer[0].output.dense.register_forward_hook(lambda *a: None),
            "layer.0",
            "has a Linear with hooks",
        ),
        (
            lambda m: setattr(m.bert.encoder.layer[0].output, "dense", nn.Bilinear(2, 2, 2)),
            "layer.0",
            "a Bilinear where",
        ),
        (
            lambda m: m.bert.encoder.layer[1].output.LayerNorm.register_forward_hook(
                lambda *a: None
            ),
            "layer.1",
            "has a LayerNorm with hooks",
        ),
        (
            lambda m: m.bert.encoder.layer[1].intermediate.register_forward_hook(lambda *a: None),
            "layer.1",
            "has a BertIntermediate with hooks",
        ),
    ],
)
def test_modules_that_cannot_be_fused_are_not_converted(
    hugging_face: Any, change: Any, where: str, reason: str
) -> None:
    model = FAMILIES["bert"].build("eager")
    change(model)
    assert reason in reasons(model)[f"bert.encoder.{where}"]


def test_report_is_readable(hugging_face: Any) -> None:
    report = str(pt.integrations.convert(FAMILIES["gpt2"].build("eager")))
    assert "2 x GPT2Block (as transformer.h.0): add_norm" in report
    assert (
        "not converted: 2 x GPT2MLP (as transformer.h.0.mlp): its Conv1D weights lie transposed"
        in report
    )


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        pt.integrations.convert({})  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=(
            "unknown kind 'norms'; the kinds are norm, feed_forward, attention, block, linear,"
            " padding"
        ),
    ):
        pt.integrations.convert(nn.Linear(2, 2), kinds=["norms"])
