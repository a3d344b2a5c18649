# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: worked examples, transformers' Switch and NLLB-MoE, two implementations."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytransformer import models, nn
from support.models import assert_same_logits
from support.small_models import build, inputs

GATES = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.2, 0.3], [0.15, 0.8, 0.05], [0.2, 0.3, 0.5]])
KINDS: dict[str, dict[str, Any]] = {
    "relu": {}, "no biases": {"bias": False, "activation": "gelu"},
    "gated": {"gated": True, "activation": "silu"},
}  # fmt: skip


def _mixture(**options: Any) -> nn.MixtureOfExperts:
    """Return three experts, 1, 2 and 3 times a unit vector, and a router with gates p for log p."""
    mixture = nn.MixtureOfExperts(3, 4, 3, **options)
    with torch.no_grad():
        mixture.router.weight.copy_(torch.eye(3))
        for p in mixture.experts.parameters():
            p.zero_()
        mixture.experts.w2_bias.copy_(torch.diag(torch.tensor([1.0, 2.0, 3.0])))
    return mixture


# ---- worked examples


def test_top_2_experts_are_weighted_by_their_gates() -> None:
    out = _mixture()(GATES.log()[None])
    expected = torch.tensor([
        [0.6 / 0.9, 2 * 0.3 / 0.9, 0], [0.5 / 0.8, 0, 3 * 0.3 / 0.8],
        [0.15 / 0.95, 2 * 0.8 / 0.95, 0], [0, 2 * 0.3 / 0.8, 3 * 0.5 / 0.8],
    ])  # fmt: skip
    torch.testing.assert_close(out, expected[None])


def test_top_1_expert_is_scaled_by_its_gate() -> None:
    expected = torch.tensor([[0.6, 0, 0], [0.5, 0, 0], [0, 1.6, 0], [0, 0, 1.5]])
    torch.testing.assert_close(_mixture(choices=1)(GATES.log()), expected)


def test_top_3_of_3_uses_all_experts() -> None:
    torch.testing.assert_close(
        _mixture(choices=3)(GATES.log()), GATES * torch.tensor([1.0, 2.0, 3.0])
    )


def test_first_choices_fill_the_capacity_first() -> None:
    out = _mixture(capacity_factor=0.375)(GATES.log())  # ceil(2 * 4 / 3 * 0.375) = 1 token each
    expected = torch.tensor(
        [[0.6 / 0.9, 0, 0], [0, 0, 0], [0, 2 * 0.8 / 0.95, 0], [0, 0, 3 * 0.5 / 0.8]]
    )
    torch.testing.assert_close(out, expected)


def test_random_second_choices_have_twice_their_weight() -> None:
    torch.manual_seed(0)
    gates = torch.tensor([0.7, 0.2, 0.1]).expand(4000, 3)
    mixture = _mixture(second="random").train()
    out = mixture(gates.log())
    torch.testing.assert_close(out[:, 0], torch.full((4000,), 0.7 / 0.9))
    came = out[:, 1] > 0
    torch.testing.assert_close(out[came, 1], torch.full((int(came.sum()),), 2 * 0.2 / 0.9))
    assert abs(came.float().mean() - 2 * 0.2 / 0.9) < 4 * (0.444 * 0.556 / 4000) ** 0.5
    assert (mixture.eval()(gates.log())[:, 1] > 0).all()
    # Dropped choices need no capacity: the 4,000 first choices of expert 0 and about 1,780 second
    # ones of expert 1 all fit.
    roomy = _mixture(second="random", capacity_factor=1.5).train()
    assert (roomy(gates.log())[:, 0] > 0).all()


def test_balance_loss_equals_a_worked_example() -> None:
    mixture = _mixture()
    mixture(GATES.log())
    # First choices 0, 0, 1, 2; mean gates (1.45, 1.6, 0.95) / 4.
    expected = 3 * (0.5 * 0.3625 + 0.25 * 0.4 + 0.25 * 0.2375)
    torch.testing.assert_close(mixture.balance_loss, torch.tensor(expected))
    torch.testing.assert_close(
        nn.balance_loss(torch.nn.Sequential(mixture, mixture)), torch.tensor(expected)
    )
    assert nn.balance_loss(torch.nn.Linear(2, 2)) is None
    even = torch.eye(3).repeat(2, 1) * 0.7 + 0.1
    mixture(even.log())
    torch.testing.assert_close(mixture.balance_loss, torch.tensor(1.0))
    mixture.balance_loss.backward()
    assert mixture.router.weight.grad is not None


def test_every_expert_and_the_router_get_gradients() -> None:
    mixture = nn.MixtureOfExperts(8, 16, 4)
    mixture(torch.randn(2, 30, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mixture.parameters())


def test_experts_without_tokens_have_zero_gradients() -> None:
    mixture = nn.MixtureOfExperts(8, 16, 4)
    mixture(torch.randn(1, 8)).sum().backward()
    assert int((mixture.experts.w1.grad.abs().sum((1, 2)) == 0).sum()) == 2
    assert mixture(torch.randn(0, 8)).shape == (0, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 1}, "num_experts must be at least 2, got 1"),
        ({"choices": 5}, "choices must be between 1 and 4 experts, got 5"),
        ({"second": "never"}, "second must be 'all' or 'random', got 'never'"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nn.MixtureOfExperts(**{"d_model": 8, "hidden": 16, "num_experts": 4, **options})


# ---- against each expert alone


def _one_by_hand(experts: nn.Experts, e: int, x: torch.Tensor) -> torch.Tensor:
    of = lambda name: None if getattr(experts, name) is None else getattr(experts, name)[e]
    activate = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[experts.activation]
    hidden = F.linear(x, of("w1"), of("w1_bias"))
    hidden = (
        activate(hidden)
        if experts.gate is None
        else activate(F.linear(x, of("gate"), of("gate_bias"))) * hidden
    )
    return F.linear(hidden, of("w2"), of("w2_bias"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["_one_by_one", "_grouped"])
def test_both_implementations_equal_single_experts(kind: str, way: str) -> None:
    """One expert has no rows, and rows after the last belong to no expert; gradients agree too."""
    torch.manual_seed(3)
    experts = nn.Experts(4, 16, 24, **KINDS[kind])
    starts = torch.tensor([0, 5, 5, 6, 13], dtype=torch.int32)
    x = torch.randn(17, 16)
    x[13:] = torch.nan
    given = x.clone().requires_grad_()
    run = getattr(experts, way)
    out = run(given, starts if way == "_one_by_one" else starts[1:])[:13]
    expected_in = x.clone().requires_grad_()
    expected = torch.cat(
        [_one_by_hand(experts, e, expected_in[a:b]) for e, (a, b) in enumerate(pairwise(starts))]
    )
    assert_same_logits(out, expected)
    upstream = torch.randn(13, 16)
    ours, theirs = (
        torch.autograd.grad(o, [i, *experts.parameters()], upstream)
        for o, i in ((out, given), (expected, expected_in))
    )
    for a, b in zip(ours, theirs, strict=True):
        assert_same_logits(a[:13] if a is ours[0] else a, b[:13] if b is theirs[0] else b)


def test_tokens_without_an_expert_get_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without an expert are undefined in both directions; the test fills them with NaN."""
    mixture, inner = nn.MixtureOfExperts(8, 16, 4, capacity_factor=0.5), nn.Experts.forward

    class Poisoned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, end: int) -> torch.Tensor:
            ctx.end = end
            return x.index_fill(0, torch.arange(end, len(x)), torch.nan)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad.index_fill(0, torch.arange(ctx.end, len(grad)), torch.nan), None

    def poisoned(self: nn.Experts, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        end = int(starts[-1])
        assert end < len(x), "no token was dropped"
        return Poisoned.apply(inner(self, Poisoned.apply(x, end).nan_to_num(), starts), end)

    x = torch.randn(40, 8, requires_grad=True)
    expected = torch.autograd.grad(mixture(x).square().sum(), [x, *mixture.parameters()])
    monkeypatch.setattr(nn.Experts, "forward", poisoned)
    for ours, theirs in zip(
        torch.autograd.grad(mixture(x).square().sum(), [x, *mixture.parameters()]),
        expected,
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_any_split_compiles_to_one_graph_and_autocast_applies() -> None:
    """No operation reads a tensor's values; grouped gemms use autocast's dtype."""
    torch.manual_seed(5)
    mixture = nn.MixtureOfExperts(16, 32, 4, capacity_factor=1.0)
    compiled = torch.compile(mixture, backend="aot_eager", fullgraph=True)
    for seed in (1, 2):
        torch.manual_seed(seed)
        x = torch.randn(30, 16)
        assert_same_logits(compiled(x), mixture(x))
    with torch.autocast("cpu", torch.bfloat16):
        ours, eager = compiled(x), mixture(x)
    assert ours.dtype == eager.dtype == torch.bfloat16
    assert (ours - mixture(x)).norm() < 16 * torch.finfo(torch.bfloat16).eps * mixture(x).norm()


# ---- against transformers


def test_switch_equals_transformers() -> None:
    """Compare the sparse network, whose capacity is per sequence, and its loss."""
    switch = pytest.importorskip(
        "transformers.models.switch_transformers.modeling_switch_transformers"
    )
    torch.manual_seed(4)
    config = switch.SwitchTransformersConfig(
        d_model=16,
        d_ff=24,
        num_experts=4,
        expert_capacity=9,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
    )
    theirs = switch.SwitchTransformersSparseMLP(config).eval()
    ours = nn.MixtureOfExperts(
        16, 24, 4, choices=1, capacity_factor=0.9, bias=False
    )  # ceil(40 / 4 * 0.9) = 9
    with torch.no_grad():
        ours.router.weight.copy_(theirs.router.classifier.weight)
        for e, expert in enumerate(theirs.experts.values()):
            ours.experts.w1[e], ours.experts.w2[e] = expert.wi.weight, expert.wo.weight
    x = torch.randn(1, 40, 16)
    found = ours(x)
    assert 0 < int((found == 0).all(-1).sum()) < 20, "some tokens must find no room"
    assert_same_logits(found, theirs(x))
    _, _, logits = theirs.router(x)
    probabilities = logits.softmax(-1)
    torch.testing.assert_close(
        ours.balance_loss, switch.load_balancing_loss_func(probabilities, logits.argmax(-1))
    )


@pytest.mark.parametrize("capacity", [40, 6])
def test_nllb_moe_router_equals_transformers(capacity: int) -> None:
    """Compare the experts of each token and their weights.

    The layer's loop over experts is left out: 5.23's reads a wrong mask.
    """
    nllb = pytest.importorskip("transformers.models.nllb_moe.modeling_nllb_moe")
    torch.manual_seed(6)
    config = nllb.NllbMoeConfig(
        d_model=16, num_experts=4, expert_capacity=capacity, second_expert_policy="all",
        normalize_router_prob_before_dropping=True, moe_eval_capacity_token_fraction=-1.0,
    )  # fmt: skip
    router = nllb.NllbMoeTop2Router(config).eval()
    ours = nn.MixtureOfExperts(
        16, 24, 4, capacity_factor=capacity / 10
    )  # ceil(2 * 20 / 4 * capacity_factor)
    with torch.no_grad():
        ours.router.weight.copy_(router.classifier.weight)
    x = torch.randn(20, 16)
    _, combined, _ = router(x)
    dropped = int((combined == 0).sum()) - 20 * 2
    assert (dropped > 0) == (capacity == 6)
    expected = sum(combined[:, e, None] * _one_by_hand(ours.experts, e, x) for e in range(4))
    assert_same_logits(ours(x), expected)


# ---- in models


@pytest.mark.parametrize("name", ["Transformer", "T5", "T5-v1.1", "GPT", "BERT", "ViT"])
def test_every_model_may_have_experts(name: str, tmp_path: Any) -> None:
    experts = {"num_experts": 4, "choices": 1, "balance_weight": 0.5, "capacity_factor": 1.5}
    model, given = build(name, experts=experts), inputs(name)
    mixtures = [m for m in model.modules() if isinstance(m, nn.MixtureOfExperts)]
    assert mixtures and all(m.choices == 1 and m.capacity_factor == 1.5 for m in mixtures)
    assert len(mixtures) < sum(isinstance(m, nn.Block) for m in model.modules())
    assert all(m.experts.w1.std() > 0 and m.experts.w2.std() > 0 for m in mixtures)
    changes = {
        "dropout": 0.0,
        **({"label_smoothing": 0.0} if hasattr(model.config, "label_smoothing") else {}),
    }
    changes |= {
        n: 0.0 for n in ("attention_dropout", "activation_dropout") if hasattr(model.config, n)
    }
    model = build(name, experts=experts, **changes)
    trained, plain = model.train()(**given).loss, model.eval()(**given).loss
    assert_same_logits(trained, plain + 0.5 * nn.balance_loss(model))
    trained.backward()
    assert all(
        m.router.weight.grad.abs().sum() > 0
        for m in model.modules()
        if isinstance(m, nn.MixtureOfExperts)
    )
    model.save(tmp_path)
    again = getattr(models, name.split("-")[0]).load(tmp_path).eval()
    assert torch.equal(again(**given).logits, model(**given).logits)
    with pytest.raises(TypeError, match="no_such"):
        build(name, experts={"num_experts": 4, "no_such": 1})
