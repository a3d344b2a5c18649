# SPDX-License-Identifier: Apache-2.0
"""Paged keys, split KV and 8-bit caches of the CUDA backend on a GPU, for bench/gpu.sh.

tests/emulator runs the same problems on the CPU.
"""

from __future__ import annotations

from typing import Any

import eight_bit_problems
import page_problems
import pytest
import split_problems
import torch
from page_problems import BF16, Problem, draw

import pytransformer as pt
from support.pages import in_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
PROBLEMS = [
    *page_problems.problems("cuda"),
    *split_problems.problems("cuda"),
    *eight_bit_problems.problems("cuda"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_each_problem(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Portable kernels read pages; contiguous keys give their bits on the same kernels."""
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
    assert problem.check()


@pytest.mark.parametrize("heads", [1, 8, 32])
@pytest.mark.parametrize("batch", [1, 16])
def test_one_token_over_8192_keys(batch: int, heads: int) -> None:
    """Paged bits equal contiguous ones, close to float64, and those of a sequence alone."""
    lengths = torch.tensor([8192 - 97 * b for b in range(batch)])
    shared = max(1, heads // 4)
    shapes = (batch, heads, 1, 128), (batch, shared, 8192, 128), (batch, shared, 8192, 128)
    query, key, value = (draw(*shape, seed=n).to("cuda", BF16) for n, shape in enumerate(shapes))
    pools, keys = in_pages(key, value, lengths, 16), lengths.cuda()
    options: dict[str, Any] = {"causal": "bottom_right", "backend": "cuda", "strict": True}
    paged = pt.attention(query, *pools.tensors, page_table=pools.table, key_lengths=keys, **options)
    whole = pt.attention(query, *pools.contiguous, key_lengths=keys, **options)
    assert torch.equal(paged, whole)
    alone = pt.attention(
        query[-1:], *(t[-1:, :, : int(lengths[-1])] for t in pools.contiguous), **options
    )
    assert torch.equal(alone, whole[-1:])
    doubles = (t.double().cpu() for t in (query, *pools.contiguous))
    exact = pt.attention(*doubles, key_lengths=lengths, causal="bottom_right", backend="reference")
    assert (whole.cpu().double() - exact).abs().max() < 4e-3


def test_table_entries_outside_the_pool_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    query, pools, lengths = page_problems.inputs(1, 16, BF16, device="cuda")
    table = pools.table.clone()
    table[0, 3] = -5
    monkeypatch.setenv("PYTRANSFORMER_CHECK", "1")
    with pytest.raises(ValueError, match=r"page_table\[0, 3\] must be a page from 0 to"):
        page_problems.attend(query, *pools.tensors, lengths, page_table=table)


def test_a_recorded_step_reads_new_lengths_and_pages() -> None:
    """In a CUDA graph the grid fits the longest sequence.

    Lengths and table are read at run time.
    """
    query, pools, lengths = page_problems.inputs(1, 16, BF16, (600, 0, 130), "cuda")
    table = pools.table.clone()
    step = lambda: page_problems.attend(
        query, *pools.tensors, lengths, page_table=table, causal="bottom_right"
    )
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = step()
    lengths.copy_(torch.tensor([33, 0, 100]))
    table[2] = table[0]
    graph.replay()
    assert all(map(torch.equal, found, step()))
