# SPDX-License-Identifier: Apache-2.0
"""rotary: values against transformers, gradients, torch's machinery, determinism, bad input.

Random problems are in test_fuzz_ops.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import OPS
from pytransformer.testing import bounds

BACKENDS = ("reference", "cpu")
LLAMA_3 = pt.RotaryScaling("llama3", 8.0, 8192, 1.0, 4.0)


@pytest.fixture(params=BACKENDS)
def op_backend(request: pytest.FixtureRequest) -> str:
    reason = pt.explain(
        "rotary", torch.zeros(1, 1, 1, 8), torch.zeros(1, dtype=torch.int64)
    ).reasons[request.param]
    if reason is not None:
        pytest.skip(f"backend {request.param}: {reason}")
    return request.param


def _x(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def _config(**rope: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    return transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=rope,
    )


# ---- angles


LLAMA: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 4096,
}
SCALED = [
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    {**LLAMA, "factor": 8.0},
    {**LLAMA, "factor": 32.0},
    {**YARN, "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "rope_theta": 150000.0, "factor": 33.0, "truncate": False, "beta_fast": 16},
    {**YARN, "factor": 2.0, "attention_factor": 1.5, "partial_rotary_factor": 0.5},
]


@pytest.mark.parametrize("rope", SCALED, ids=lambda rope: f"{rope['rope_type']}-{rope['factor']:g}")
def test_frequencies_equal_transformers(rope: dict[str, Any]) -> None:
    """Bits are equal, with the factor of cos and sin."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = _config(**rope)
    for length in (None, 300_000):
        theirs, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=length)
        ours = pt.RotaryPositions.from_hugging_face(config)
        assert torch.equal(ours.frequencies(length), theirs)
        assert (
            ours.scaling is not None
            and ours.scaling.of_tables == factor
            and ours.dims == 2 * len(theirs)
        )


def test_default_frequencies_and_tables_equal_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = _config(rope_type="default", rope_theta=500000.0)
    theirs, ours = LlamaRotaryEmbedding(config), pt.RotaryPositions.from_hugging_face(config)
    assert torch.equal(ours.frequencies(), theirs.inv_freq)
    positions = torch.arange(64)[None]  # angles so small that float32 products are exact enough
    for mine, other in zip(ours.tables(positions), theirs(torch.zeros(1), positions)):
        torch.testing.assert_close(
            mine, other, rtol=0, atol=64 * torch.finfo(torch.float32).eps
        )  # relative to the max angle


def test_older_configurations_use_other_fields() -> None:
    old = SimpleNamespace(
        hidden_size=256, num_attention_heads=4, rope_theta=5000.0, max_position_embeddings=2048
    )
    assert pt.RotaryPositions.from_hugging_face(old) == pt.RotaryPositions(64, 5000.0)
    old.rope_scaling = {"type": "linear", "factor": 2.0}
    assert pt.RotaryPositions.from_hugging_face(old) == pt.RotaryPositions(
        64, 5000.0, pt.RotaryScaling("linear", 2.0)
    )
    old.rope_scaling = {"type": "longrope", "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type 'longrope' is not known"):
        pt.RotaryPositions.from_hugging_face(old)


def test_large_angles_are_exact(op_backend: str) -> None:
    """A float32 product is wrong by 0.002 radians there, as transformers' formula shows."""
    positions, turning = torch.tensor([131071, 1_000_003]), pt.RotaryPositions(64)
    exact = positions.double()[:, None] * turning.frequencies().double()
    x = torch.zeros(1, 1, 2, 64)
    x[..., :32] = 1.0
    out = pt.rotary(x, positions, backend=op_backend)
    assert (out[0, 0, :, :32] - exact.cos()).abs().max() < 2**-23 and (
        out[0, 0, :, 32:] - exact.sin()
    ).abs().max() < 2**-23
    in_float = (positions.float()[:, None] * turning.frequencies()).cos()
    assert (in_float - exact.cos()).abs().max() > 1e-3


# ---- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads_last", [False, True])
def test_rotation_equals_transformers(
    dtype: torch.dtype, heads_last: bool, op_backend: str
) -> None:
    """Ours is within a rounding to dtype of Llama's formula in float32 on its tables."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    rope = LlamaRotaryEmbedding(_config(**SCALED[2]))
    x = (
        torch.randn(2, 9, 4, 128, dtype=dtype).transpose(1, 2)
        if heads_last
        else torch.randn(2, 4, 9, 128, dtype=dtype)
    )
    cos, sin = rope(x, torch.arange(9)[None].expand(2, 9))
    expected, _ = apply_rotary_pos_emb(x.float(), x.float(), cos.float(), sin.float())
    found = pt.rotary(x, cos=cos, sin=sin, backend=op_backend)
    assert found.stride() == x.stride()
    assert bounds.agree(found, expected, dtype)


def test_interleaved_rotation_equals_gptj(op_backend: str) -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    pytest.importorskip("transformers", reason="needs transformers")
    x, positions = torch.randn(2, 3, 8, 64), torch.arange(8)
    angle = positions[:, None].float() * pt.RotaryPositions(32).frequencies()
    expected = apply_rotary_pos_emb(
        x[..., :32].transpose(1, 2), angle.sin()[None], angle.cos()[None]
    ).transpose(1, 2)
    found = pt.rotary(x, positions, dims=32, interleaved=True, backend=op_backend)
    torch.testing.assert_close(found[..., :32], expected)
    assert torch.equal(found[..., 32:], x[..., 32:])


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_query_norm_equals_that_of_models(name: str, op_backend: str) -> None:
    if name == "qwen3":
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm as Norm
    else:
        from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm as Norm
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    norm, x, positions = Norm(64, eps=1e-5), torch.randn(2, 3, 8, 64), torch.arange(8)
    torch.nn.init.normal_(norm.weight)
    cos, sin = pt.RotaryPositions(64).tables(positions[None])
    normed = norm(x)
    expected, _ = apply_rotary_pos_emb(normed, normed, cos, sin)
    found = pt.rotary(
        x,
        positions,
        weight=norm.weight,
        eps=1e-5,
        weight_offset=float(name == "gemma3"),
        backend=op_backend,
    )
    torch.testing.assert_close(found, expected)


def test_equivalent_arguments_give_equal_results(op_backend: str) -> None:
    x, positions = torch.randn(2, 3, 7, 16), torch.randint(0, 500, (2, 7))
    plain = pt.rotary(x, positions, base=500.0, dims=12, backend=op_backend)
    turning = pt.RotaryPositions(12, 500.0)
    cos, sin = turning.tables(positions)
    assert torch.equal(plain, pt.rotary(x, cos=cos, sin=sin, dims=12, backend=op_backend))
    assert torch.equal(
        plain, pt.rotary(x, positions, frequencies=turning.frequencies(), backend=op_backend)
    )
    assert torch.equal(
        plain[:1], pt.rotary(x[:1], positions[0].int(), base=500.0, dims=12, backend=op_backend)
    )
    assert torch.equal(x, pt.rotary(x, torch.zeros(7, dtype=torch.int64), backend=op_backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_bits_with_and_without_gradient(dtype: torch.dtype, op_backend: str) -> None:
    x, weight, positions = torch.randn(2, 3, 9, 40, dtype=dtype), torch.randn(40), torch.arange(9)
    with_grad = pt.rotary(x.requires_grad_(), positions, weight=weight, backend=op_backend)
    assert torch.equal(
        with_grad, pt.rotary(x.detach(), positions, weight=weight, backend=op_backend)
    )


def test_empty_inputs(op_backend: str) -> None:
    for shape in ((0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)):
        x, weight = torch.randn(shape, requires_grad=True), torch.ones(8, requires_grad=True)
        out = pt.rotary(
            x, torch.zeros(shape[2], dtype=torch.int64), weight=weight, backend=op_backend
        )
        assert out.shape == shape
        dx, dw = torch.autograd.grad(out.sum(), (x, weight))
        assert dx.shape == shape and not dw.any()


# ---- gradients


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_gradcheck_and_gradgradcheck(norm: bool, interleaved: bool, op_backend: str) -> None:
    leaves = [_x(2, 2, 3, 6)] + ([_x(6)] if norm else [])
    positions = torch.randint(0, 50, (2, 3))

    def function(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        of_norm = {} if weight is None else {"weight": weight, "eps": 1e-3, "weight_offset": 0.5}
        return pt.rotary(
            x, positions, dims=4, interleaved=interleaved, **of_norm, backend=op_backend
        )

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_gradient_is_the_inverse_rotation(op_backend: str) -> None:
    x, positions = _x(1, 2, 5, 8), torch.arange(5)
    (dx,) = torch.autograd.grad(
        pt.rotary(x, positions, backend=op_backend), x, torch.ones(1, 2, 5, 8, dtype=torch.float64)
    )
    torch.testing.assert_close(dx, pt.rotary(torch.ones_like(x), -positions, backend="reference"))


# ---- torch's machinery


@pytest.mark.unpoisoned
@pytest.mark.parametrize("norm", [False, True])
def test_opcheck(norm: bool, op_backend: str) -> None:
    op = OPS["rotary"]
    x, positions = torch.randn(2, 5, 3, 8).transpose(1, 2), torch.arange(5)
    cos, sin = pt.RotaryPositions(6).tables(positions[None])
    a = (x, cos, sin, torch.randn(8) if norm else None, False, 1e-6, 0.0)
    torch.library.opcheck(op.fwd, (*a, op_backend, True))
    _, rstd = op.fwd(*a, op_backend, True)
    torch.library.opcheck(op.bwd, (torch.randn_like(x), *a, rstd, [True, norm], op_backend, True))


@pytest.mark.unpoisoned
def test_compiles_to_one_graph(op_backend: str) -> None:
    x, weight, positions = (
        _x(2, 3, 9, 32, dtype=torch.float32),
        _x(32, dtype=torch.float32),
        torch.arange(9),
    )

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (
            pt.rotary(x, positions, scaling=LLAMA_3, weight=weight, backend=op_backend).sin().sum()
        )

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours, want = compiled(x, weight), function(x, weight)
    torch.testing.assert_close(ours, want)
    for a, e in zip(torch.autograd.grad(ours, (x, weight)), torch.autograd.grad(want, (x, weight))):
        torch.testing.assert_close(a, e)


def test_func_transforms_equal_autograd(op_backend: str) -> None:
    x, positions = torch.randn(3, 1, 2, 4, 6, dtype=torch.float64), torch.arange(4)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return pt.rotary(x, positions, backend=op_backend).sin().sum()

    leaf = x.clone().requires_grad_()
    want = torch.stack([torch.autograd.grad(loss(one), leaf)[0][i] for i, one in enumerate(leaf)])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), want)
    torch.testing.assert_close(torch.func.vmap(loss)(x), torch.stack([loss(one) for one in x]))
    with pytest.raises(RuntimeError):
        torch.func.jvp(loss, (x[0],), (x[0],))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    """Autocast does not change the products of a model's formula either."""
    x, weight, positions = torch.randn(1, 2, 3, 16, dtype=dtype), torch.ones(16), torch.arange(3)
    want = pt.rotary(x, positions, weight=weight)
    with torch.autocast("cpu"):
        found = pt.rotary(x, positions, weight=weight)
    assert found.dtype == dtype and torch.equal(found, want)


# ---- determinism


def test_equal_bits_over_runs_and_threads() -> None:
    x, weight, positions = (
        _x(3, 4, 300, 48, dtype=torch.float32),
        _x(48, dtype=torch.float32),
        torch.arange(300),
    )
    grad = torch.randn(3, 4, 300, 48)

    def results() -> list[torch.Tensor]:
        out = pt.rotary(x, positions, weight=weight, backend="cpu")
        return [out, *torch.autograd.grad(out, (x, weight), grad)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = results()
        for n in (2, 3, 1, 2):
            torch.set_num_threads(n)
            assert all(torch.equal(a, b) for a, b in zip(results(), want)), n
    finally:
        torch.set_num_threads(threads)


def test_rows_do_not_depend_on_other_rows() -> None:
    x, positions = torch.randn(2, 3, 90, 64), torch.randint(0, 999, (2, 90))
    whole = pt.rotary(x, positions, weight=torch.ones(64), backend="cpu")
    part = pt.rotary(x[1:, 2:, 7:8], positions[1:, 7:8], weight=torch.ones(64), backend="cpu")
    assert torch.equal(whole[1:, 2:, 7:8], part)


# ---- bad input


POSITIONS = torch.arange(3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: pt.rotary(x), ValueError, "give positions, or cos and sin, and not both"),
        (lambda x: pt.rotary(x[0], POSITIONS), ValueError, "x must have 4 dimensions"),
        (lambda x: pt.rotary(x.long(), POSITIONS), TypeError, "x must be float32"),
        (lambda x: pt.rotary(x, POSITIONS.float()), TypeError, "positions must be int64 or int32"),
        (lambda x: pt.rotary(x, POSITIONS[:2]), ValueError,
            r"positions must have the shape \(2, 3\) or \(3,\)"),
        (lambda x: pt.rotary(x, POSITIONS, dims=3), ValueError,
            "dims must be an even number from 2 to x's last dimension, 8, got 3"),
        (lambda x: pt.rotary(x, POSITIONS, dims=10), ValueError, "dims must be an even number"),
        (lambda x: pt.rotary(x, POSITIONS, base=0.0), ValueError, "base must be greater than 0"),
        (lambda x: pt.rotary(x, POSITIONS, frequencies=torch.ones(4), dims=8), ValueError,
            "dims must be left out beside"),
        (lambda x: pt.rotary(x, POSITIONS, frequencies=torch.ones(5)), ValueError,
            r"2 \* len\(frequencies\) must be an even"),
        (lambda x: pt.rotary(x, POSITIONS, weight=torch.ones(4)), ValueError,
            r"weight must have the shape \(8,\)"),
        (lambda x: pt.rotary(x, cos=torch.ones(3, 8)), TypeError, "sin must be a Tensor"),
        (lambda x: pt.rotary(x, cos=torch.ones(3, 8), sin=torch.ones(3, 6)), ValueError,
            "cos and sin must have one shape"),
        (lambda x: pt.rotary(x, cos=torch.ones(4, 8), sin=torch.ones(4, 8)), ValueError,
            "cos must have the shape"),
        (lambda x: pt.rotary(x, cos=torch.ones(3, 8, requires_grad=True), sin=torch.ones(3, 8)),
            ValueError, "cos has no gradient"),
        (lambda x: pt.rotary(x, POSITIONS, backend="fast"), ValueError, "unknown backend 'fast'"),
        (lambda x: pt.RotaryPositions(7), ValueError, "dims must be an even int"),
        (lambda x: pt.RotaryScaling("ntk"), ValueError, "kind must be one of"),
        (lambda x: pt.RotaryScaling("yarn", 4.0), ValueError, "yarn needs original_length"),
        (lambda x: pt.RotaryScaling("linear", 0.0), ValueError, "factor must be greater than 0"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(2, 2, 3, 8))
