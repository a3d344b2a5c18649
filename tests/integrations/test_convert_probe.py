# SPDX-License-Identifier: Apache-2.0
"""convert() and code with an unknown digest: equal mathematics passes the probe, other does not."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import linecache
import re
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import pytransformer as pt
from pytransformer.integrations.convert import code, modules, probe, rules
from support.hugging_face import (
    FAMILIES,
    distance,
    flat,
    inputs_of,
    model_distance_limit,
    run,
)

LIMIT = model_distance_limit(torch.float32)
QUICK = ("bert", "llama", "gpt2")
NO_PROBE = ("T5Attention", "GPT2MLP")  # the second has no fused form
Edit = tuple[str, str, tuple[tuple[str, str], ...]]  # file, function or Class.method, replacements


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Probe anew in each test."""
    saved = dict(code._ACCEPTED), dict(probe._seen), dict(modules._FORWARDS)
    yield
    for store, before in zip((code._ACCEPTED, probe._seen, modules._FORWARDS), saved):
        store.clear()
        store.update(before)


def recompiled(function: Any, source: str) -> Any:
    """Return the function with another source, which inspect finds."""
    name = f"<planted {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    local: dict[str, Any] = {}
    exec(compile(source, name, "exec"), function.__globals__, local)
    return local[function.__name__]


def source_of(owner: Any, name: str) -> tuple[Any, str]:
    """Return the function and its source, without decorators."""
    function = code.function_of(inspect.getattr_static(owner, name))
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    return function, ast.unparse(node)


def plant(patch: pytest.MonkeyPatch, model: str, place: str, replacements: Any) -> None:
    """Replace text in the source of a function or method of a model's file."""
    path = model if model == "pytorch_utils" else f"models.{model}.modeling_{model}"
    owner: Any = importlib.import_module(f"transformers.{path}")
    *outer, name = place.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function, source = source_of(owner, name)
    if "past_key_values" not in source:  # as since transformers 5.24
        replacements = [
            [text.replace("past_key_values", "cache") for text in pair] for pair in replacements
        ]
    for old, new in replacements:
        assert old in source, f"{old!r} is not in {source}"
        # A name is renamed wherever it stands alone.
        source = (
            re.sub(rf"\b{old}\b", new, source) if old.isidentifier() else source.replace(old, new)
        )
    patch.setattr(owner, name, recompiled(function, source))


RENAMED = (("hidden_states", "stream"),)
EQUAL: dict[str, tuple[str, str, list[Edit]]] = {
    "a renamed variable of a norm": (
        "llama", "LlamaRMSNorm", [("llama", "LlamaRMSNorm.forward", (("variance", "power"),))]),
    "another spelling of a norm": (
        "llama", "LlamaRMSNorm", [("llama", "LlamaRMSNorm.forward", ((".pow(2)", ".square()"),))]),
    "a renamed argument of a norm": (
        "t5", "T5LayerNorm", [("t5", "T5LayerNorm.forward", RENAMED)]),
    "a statement for a nested call": (
        "llama", "LlamaMLP", [("llama", "LlamaMLP.forward", (
            ("    down_proj =", "    up = self.up_proj(x)\n    down_proj ="),
            ("* self.up_proj(x)", "* up")))]),
    "renamed variables of a network with dropout": (
        "t5", "T5DenseActDense", [("t5", "T5DenseActDense.forward", RENAMED)]),
    "a sum in another order": (
        "bert", "BertSelfOutput", [("bert", "BertSelfOutput.forward", (
            ("hidden_states + input_tensor", "input_tensor + hidden_states"),))]),
    "a renamed variable of a bypassed module": (
        "bert", "BertLayer", [("bert", "BertIntermediate.forward", RENAMED)]),
    "a renamed argument of a block": (
        "llama", "LlamaDecoderLayer", [
            ("llama", "LlamaDecoderLayer.forward", (
                ("residual", "skip"), ("past_key_values", "cache"))),
            ("llama", "LlamaAttention.forward", (
                ("query_states", "q"), ("past_key_values", "cache")))]),
    "independent statements in another order": (
        "gpt2", "GPT2Block", [("gpt2", "GPT2Block.forward", (
            ("    residual = hidden_states\n    hidden_states = self.ln_1(hidden_states)",
             "    before = hidden_states\n    hidden_states = self.ln_1(before)"),
            ("attn_output + residual", "before + attn_output")))]),
    "another spelling of the rotation": (
        "llama", "LlamaAttention", [("llama", "apply_rotary_pos_emb", (
            ("q * cos + rotate_half(q) * sin", "rotate_half(q) * sin + q * cos"),))]),
    "a renamed variable of a linear layer": (
        "gpt2", "Conv1D", [("pytorch_utils", "Conv1D.forward", (("size_out", "shape"),))]),
    "a post-norm block in fewer statements": (
        "bart", "BartEncoderLayer", [("bart", "BartEncoderLayer.forward", (
            ("    hidden_states = residual + hidden_states\n"
             "    hidden_states = self.final_layer_norm(hidden_states)",
             "    hidden_states = self.final_layer_norm(hidden_states + residual)"),))]),
}  # fmt: skip


def text(of: str, place: str, *replacements: tuple[str, str]) -> tuple[str, str, list[Edit]]:
    family, file = of.split()
    return family, place.split(".")[0], [(file, place, replacements)]


DIFFERENT: dict[str, tuple[str, str, list[Edit]]] = {
    "epsilon outside the root": text("llama llama", "LlamaRMSNorm.forward", (
        "torch.rsqrt(variance + self.variance_epsilon)",
        "(torch.rsqrt(variance) + self.variance_epsilon)")),
    "a norm with an offset of its weight": text("llama llama", "LlamaRMSNorm.forward", (
        "self.weight *", "(1 + self.weight) *")),
    "a norm that subtracts the mean": text("t5 t5", "T5LayerNorm.forward", (
        "variance =", "hidden_states = hidden_states - hidden_states.mean(-1, keepdim=True)\n"
        "    variance =")),
    "a norm that clamps": text("llama llama", "LlamaRMSNorm.forward", (
        "return self.weight",
        "hidden_states = hidden_states.clamp(-50, 50)\n    return self.weight")),
    "another order of activation and product": text("llama llama", "LlamaMLP.forward", (
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.act_fn(self.gate_proj(x) * self.up_proj(x))")),
    "the activation of the other branch": text("llama llama", "LlamaMLP.forward", (
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.gate_proj(x) * self.act_fn(self.up_proj(x))")),
    "a dropped bias": text("bert bert", "BertSelfOutput.forward", (
        "self.dense(hidden_states)", "self.dense(hidden_states) - self.dense.bias")),
    "another place of dropout": text("bert bert", "BertSelfOutput.forward", (
        "    hidden_states = self.dropout(hidden_states)\n", ""),
        ("(hidden_states + input_tensor)", "(self.dropout(hidden_states + input_tensor))")),
    "no dropout": text("bert bert", "BertSelfOutput.forward", (
        "    hidden_states = self.dropout(hidden_states)\n", "")),
    "a residual after the norm": text("llama llama", "LlamaDecoderLayer.forward", (
        "    hidden_states = self.post_attention_layernorm(hidden_states)\n"
        "    hidden_states = self.mlp",
        "    hidden_states = residual = self.post_attention_layernorm(hidden_states)\n"
        "    hidden_states = self.mlp")),
    "a scaled branch": text("llama llama", "LlamaDecoderLayer.forward", (
        "hidden_states = self.mlp(hidden_states)",
        "hidden_states = self.mlp(hidden_states) * 0.9")),
    "an extra norm": text("gpt2 gpt2", "GPT2Block.forward", (
        "self.mlp(hidden_states)", "self.ln_1(self.mlp(hidden_states))")),
    "a branch for long inputs": text("llama llama", "LlamaDecoderLayer.forward", (
        "    hidden_states = self.mlp",
        "    if hidden_states.shape[1] > 2048:\n        hidden_states = hidden_states * 2\n"
        "    hidden_states = self.mlp")),
    "a cut of long inputs": text("llama llama", "LlamaMLP.forward", (
        "self.gate_proj(x)", "self.gate_proj(x[:, :2048])")),
    "a branch on a flag of the config": text("llama llama", "LlamaDecoderLayer.forward", (
        "    hidden_states = self.mlp",
        "    if self.self_attn.config.tie_word_embeddings:\n"
        "        hidden_states = -hidden_states\n"
        "    hidden_states = self.mlp")),
    "a branch on a flag of its own config": text("llama llama", "LlamaMLP.forward", (
        "    return", "    if self.config.tie_word_embeddings:\n        down_proj = -down_proj\n"
        "    return")),
    "a branch on an unknown keyword": text("llama llama", "LlamaDecoderLayer.forward", (
        "    hidden_states = self.mlp",
        "    if kwargs.get('doubled'):\n        hidden_states = hidden_states * 2\n"
        "    hidden_states = self.mlp")),
    "a new argument": text("bert bert", "BertSelfOutput.forward", (
        "input_tensor: torch.Tensor", "input_tensor: torch.Tensor, gain: float = 1.0"),
        ("+ input_tensor", "+ input_tensor * gain")),
    "a branch on large values": text("bart bart", "BartEncoderLayer.forward", (
        "    return hidden_states",
        "    if hidden_states.abs().max() > 100:\n        hidden_states = hidden_states / 2\n"
        "    return hidden_states")),
    "another rotation": text("llama llama", "LlamaAttention.forward", (
        "= apply_rotary_pos_emb(query_states, key_states, cos, sin)",
        "= apply_rotary_pos_emb(query_states, key_states, cos, -sin)")),
    "another scaling": text("llama llama", "LlamaAttention.forward", (
        "scaling=self.scaling", "scaling=self.scaling * 2")),
    "keys rotated after the cache": text("llama llama", "LlamaAttention.forward", (
        "key_states, value_states = past_key_values.update(key_states,",
        "key_states, value_states = past_key_values.update(key_states * 2,")),
    "a linear layer without its bias": text("gpt2 pytorch_utils", "Conv1D.forward", (
        "torch.addmm(self.bias", "torch.addmm(self.bias * 0")),
    "a loop": text("bert bert", "BertSelfOutput.forward", (
        "    return", "    for _ in range(1):\n        hidden_states = hidden_states\n    return")),
}  # fmt: skip


def rows_of(model: nn.Module, cls: str) -> tuple[set[str], set[str]]:
    """Return convert()'s report on the modules of a class: converted, skipped."""
    conversion = pt.integrations.convert(model)
    return (
        {what for _, of, what in conversion.converted if of == cls},
        {reason for _, of, reason in conversion.skipped if of == cls},
    )


def planted(patch: pytest.MonkeyPatch, case: tuple[str, str, list[Edit]]) -> tuple[nn.Module, str]:
    family, cls, edits = case
    for edit in edits:
        plant(patch, *edit)
    return FAMILIES[family].build("eager"), cls


@pytest.mark.parametrize("case", EQUAL)
def test_equal_code_converts_by_probe(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model, cls = planted(monkeypatch, EQUAL[case])
    converted, skipped = rows_of(model, cls)
    assert not skipped and len(converted) == 1, skipped
    assert "by probe" in converted.pop()
    family = FAMILIES[EQUAL[case][0]]
    if "past_key_values" not in str(EQUAL[case]):  # the model passes the earlier name
        inputs = inputs_of(family, "none")
        logits, grads = run(family.build("eager"), family, inputs)
        ours, our_grads = run(model, family, inputs)
        assert distance(ours, logits) < LIMIT
        assert distance(flat(our_grads), flat(grads)) < LIMIT


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_code_is_left_alone(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model, cls = planted(monkeypatch, DIFFERENT[case])
    converted, skipped = rows_of(model, cls)
    assert not converted
    assert len(skipped) == 1 and "is not one we have checked" in skipped.pop()


def without_digests(patch: pytest.MonkeyPatch) -> None:
    """Make the code of every rule and bypassed module unknown."""
    unknown = {
        key: dataclasses.replace(rule, digests=("unknown",)) if rule.digests else rule
        for key, rule in rules.RULES.items()
    }
    patch.setattr(rules, "RULES", unknown)
    patch.setattr(
        modules, "_BYPASSED", {m: dict.fromkeys(c, "unknown") for m, c in modules._BYPASSED.items()}
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else (pytest.mark.slow,)) for n in FAMILIES]
)
def test_rules_convert_by_probe_alone(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without digests the same modules convert, and the model equals its eager code."""
    family = FAMILIES[name]
    expected = pt.integrations.convert(family.build("eager")).converted
    without_digests(monkeypatch)
    model = family.build("eager")
    conversion = pt.integrations.convert(model)
    assert {(n, of) for n, of, _ in conversion.converted} == {
        (n, of) for n, of, _ in expected if of not in NO_PROBE
    }, conversion.skipped
    assert any("by probe" in what for *_, what in conversion.converted)
    inputs = inputs_of(family, "none")
    logits, grads = run(family.build("eager"), family, inputs)
    ours, our_grads = run(model, family, inputs)
    assert distance(ours, logits) < LIMIT and distance(flat(our_grads), flat(grads)) < LIMIT


class _Mutation(ast.NodeTransformer):
    """The n-th change of a function: an operator, a number, or a call replaced by its argument."""

    def __init__(self, number: int) -> None:
        self.left = number

    def _now(self) -> bool:
        self.left -= 1
        return self.left == -1

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other: Any = {ast.Add: ast.Sub, ast.Mult: ast.Add, ast.Sub: ast.Add}.get(type(node.op))
        if other is not None and self._now():
            node.op = other()
        if isinstance(node.op, (ast.Add, ast.Mult)) and self._now():
            return node.left
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if node.args and self._now():
            return node.args[0]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        return ast.Pass() if self._now() else node


def mutants(function: Any, source: str) -> Iterator[Any]:
    for number in range(200):
        tree, mutation = ast.parse(source), _Mutation(number)
        changed = ast.fix_missing_locations(mutation.visit(tree))
        if mutation.left >= 0:
            return
        with contextlib.suppress(SyntaxError):  # *x without a call around it
            yield recompiled(function, ast.unparse(changed))


@pytest.mark.parametrize(
    ("name", "every"),
    [*(pytest.param(n, 1, marks=pytest.mark.slow) for n in FAMILIES)],
)
def test_no_mutant_of_a_rules_code_converts_to_another_model(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, name: str, every: int
) -> None:
    """A mutant that converts gives the logits and gradients of the unconverted mutant."""
    family = FAMILIES[name]
    inputs = inputs_of(family, "none")
    fresh = family.build("eager")
    places = {}
    for cls in {type(m) for m in fresh.modules()}:
        rule = rules.find_rule(cls)
        if rule is not None and rule.digests:
            places |= {(p.owner, p.name): cls for p in code.reached(cls, rule.method)}
    refused, wrong = 0, []
    for (owner, attribute), cls in places.items():
        if not inspect.isfunction(inspect.getattr_static(owner, attribute)):
            continue  # a static method of T5's attention, which is not probed
        for i, mutant in enumerate(mutants(*source_of(owner, attribute))):
            if i % every:
                continue
            with monkeypatch.context() as patch:
                patch.setattr(owner, attribute, mutant)
                model = family.build("eager")
                converted, _ = rows_of(model, cls.__name__)
                if not converted:
                    refused += 1
                    continue
                try:
                    expected, grads = run(family.build("eager"), family, inputs)
                except Exception:  # a mutant that raises
                    continue
                ours, our_grads = run(model, family, inputs)
                same = distance(ours, expected) < LIMIT
                if not (same and distance(flat(our_grads), flat(grads)) < LIMIT):
                    wrong.append(f"{owner.__name__}.{attribute}, mutant {i}")
    assert refused > 3 and not wrong, f"{refused} refused, accepted: {wrong}"


def test_each_class_is_probed_once(hugging_face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_digests(monkeypatch)
    probed: list[str] = []
    compare = probe._compare
    monkeypatch.setattr(
        probe, "_compare", lambda r, m, s: (probed.append(type(m).__name__), compare(r, m, s))[1]
    )
    for _ in range(2):
        pt.integrations.convert(FAMILIES["llama"].build("eager"))
    assert sorted(probed) == [
        "LlamaAttention", "LlamaDecoderLayer", "LlamaMLP", "LlamaRMSNorm"
    ]  # fmt: skip


def test_one_refused_configuration_refuses_the_class(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal code for one setting of a number does not prove another setting."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    new = (("self.down_proj(", "(1 + self.config.pad_token_id) * self.down_proj("),)
    plant(monkeypatch, "llama", "LlamaMLP.forward", new)
    config = copy.deepcopy(FAMILIES["llama"].build("eager").config)
    equal = LlamaMLP(config)
    other = copy.deepcopy(equal)
    other.config.pad_token_id = 2
    assert "(by probe)" in str(pt.integrations.convert(copy.deepcopy(equal)))
    for model in (nn.ModuleList([equal, other]), nn.ModuleList([other, equal]), equal):
        assert "differs" in pt.integrations.convert(model).skipped[0][2]
        assert not [of for _, of, _ in pt.integrations.convert(model).converted if "MLP" in of]


def test_known_digests_run_no_probe(hugging_face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_compare", lambda *args: pytest.fail("the probe ran"))
    model = FAMILIES["llama"].build("eager")
    assert not [what for *_, what in pt.integrations.convert(model).converted if "probe" in what]


def test_probe_changes_neither_model_nor_generator(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_digests(monkeypatch)
    model = FAMILIES["bart"].build("eager").train()
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    pt.integrations.convert(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(m.training for m in model.modules())
    assert model.config.dropout == before_dropout(FAMILIES["bart"])


def before_dropout(family: Any) -> float:
    return family.build("eager").config.dropout


def test_explain_reports_the_probe(hugging_face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *EQUAL["a renamed variable of a norm"][2][0])
    family = FAMILIES["llama"]
    model = family.build("eager")
    pt.integrations.convert(model)
    report = str(pt.explain(model, inputs_of(family, "none")))
    assert "by probe: 5 x LlamaRMSNorm, first model.layers.0.input_layernorm: rms_norm" in report


def test_limit_is_that_of_whole_models() -> None:
    assert probe.LIMIT * torch.finfo(torch.float32).eps == LIMIT


def test_revert_keeps_a_parametrization() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    expected = model(x)
    pt.integrations.convert(model)
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    pt.integrations.revert(model)
    assert torch.equal(model(x), expected)
    assert type(model[0]).__bases__ == (nn.Linear,)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear


@pytest.mark.filterwarnings("ignore:.*(torch.ao.quantization|quantized tensor creation)")
def test_dynamic_quantization_of_a_converted_model_warns() -> None:
    quantize = functools.partial(
        torch.ao.quantization.quantize_dynamic, qconfig_spec={nn.Linear}, dtype=torch.qint8
    )
    model = nn.Sequential(nn.Linear(4, 4))
    conversion = pt.integrations.convert(model)
    with pytest.warns(UserWarning, match="skips a converted Linear"):
        assert isinstance(quantize(model)[0], nn.Linear)
    conversion.revert()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="convert:")
        assert type(quantize(model)[0]).__module__.startswith("torch.ao")
