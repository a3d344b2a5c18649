# SPDX-License-Identifier: Apache-2.0
"""rotary and append_kv of the CUDA kernels on a GPU, for bench/gpu.sh.

tests/emulator runs the same problems on the CPU.
"""

from __future__ import annotations

import append_problems
import page_problems
import pytest
import rotary_problems
import torch

import pytransformer as pt
from pytransformer.testing import bounds
from support import fuzz_rotary
from support.cuda_graph import check_cuda_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
RANDOM, SEED = 300, 14


def test_every_path() -> None:
    for problem in rotary_problems.problems():
        _, wrong = fuzz_rotary.judge(problem.problem, "cuda", True, "cuda")
        assert not wrong, f"{problem}: {wrong}"


@pytest.mark.parametrize(
    "problem", list(append_problems.problems("cuda")), ids=lambda problem: problem.name
)
def test_into_eight_bits(problem: page_problems.Problem) -> None:
    assert problem.check()


def test_random_problems() -> None:
    failed = []
    for case, problem in rotary_problems.drawn(SEED, RANDOM):
        _, wrong = fuzz_rotary.judge(problem, "cuda", True, "cuda")
        failed += [f"case {case}: {problem}\n    {wrong}"] * bool(wrong)
    assert not failed, "\n".join(failed[:5])


@pytest.mark.parametrize("interleaved", [False, True])
def test_bits_without_a_norm_equal_the_cpu(interleaved: bool) -> None:
    """nvcc's code rounds in the order of the emulator."""
    x, (cos, sin) = torch.randn(2, 8, 33, 128), torch.randn(2, 2, 33, 128)  # tables (2, 33, 128)
    found = pt.rotary(
        x.cuda(), cos=cos.cuda(), sin=sin.cuda(), interleaved=interleaved, backend="cuda"
    )
    # Each product but the last is rounded: exact in float64, then rounded once.
    other = (
        torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        if interleaved
        else torch.cat((-x[..., 64:], x[..., :64]), -1)
    )
    rounded = (other * sin[:, None]).double()
    assert torch.equal(found.cpu(), (x.double() * cos[:, None].double() + rounded).float())


def test_rotary_addresses_beyond_32_bits() -> None:
    """Rows are far apart, and there are more than 2^31 elements."""
    x = torch.zeros(1, 2, 2**31 // 256 + 40, 128, device="cuda", dtype=torch.bfloat16)
    x[:, 1, -40:] = torch.randn(40, 128, device="cuda")
    cos, sin = pt.RotaryPositions(128).tables(
        torch.arange(x.shape[2], device="cuda") % 4096, dtype=torch.bfloat16
    )
    y = pt.rotary(x, cos=cos, sin=sin, backend="cuda", strict=True)[:, 1:, -40:]
    assert bounds.agree(
        y, pt.rotary(x[:, 1:, -40:], cos=cos[-40:], sin=sin[-40:], backend="reference")
    )


def test_in_cuda_graphs() -> None:
    x, positions = (
        torch.randn(2, 4, 9, 64, device="cuda", dtype=torch.bfloat16),
        torch.arange(9, device="cuda"),
    )
    weight = torch.ones(64, device="cuda")
    check_cuda_graph(lambda: pt.rotary(x, positions, weight=weight, backend="cuda"), x)
    cache = pt.KeyValues(
        *(torch.zeros(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    )
    tables = pt.RotaryPositions(64).tables(positions)
    check_cuda_graph(
        lambda: pt.append_kv(x, x, x, cache, positions.repeat(2, 1), rotary=tables, backend="cuda"),
        x,
    )
    assert torch.equal(cache.value[:, :, :9], x)


def test_positions_outside_the_cache_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not write them; PYTRANSFORMER_CHECK=1 raises."""
    cache = pt.KeyValues(*(torch.zeros(1, 1, 3, 8, device="cuda") for _ in range(2)))
    rows, positions = (
        [torch.ones(1, 1, 1, 8, device="cuda")] * 3,
        torch.tensor([[3]], device="cuda"),
    )
    pt.append_kv(*rows, cache, positions, backend="cuda")
    assert not cache.key.any() and not cache.value.any()
    monkeypatch.setenv("PYTRANSFORMER_CHECK", "1")
    with pytest.raises(
        ValueError, match="positions holds 3, and the cache has room for 3 keys a sequence"
    ):
        pt.append_kv(*rows, cache, positions, backend="cuda")
