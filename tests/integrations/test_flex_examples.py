# SPDX-License-Identifier: Apache-2.0
"""FlexAttention's published examples as pt.attention calls, against eager flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

import pytransformer as pt
from support.models import assert_same_elements

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
]

B, H, L, D = 2, 4, 160, 16
WINDOW, CAP = 24, 5.0
PREFIX = torch.tensor([40, 75])
DOCUMENTS = torch.tensor([0] * 30 + [1] * 50 + [2] * 80).expand(B, L)
LENGTHS = torch.tensor([L, 97])
SLOPES = torch.exp2(-torch.arange(1, H + 1) * 8.0 / H)
TABLE = torch.randn(2 * L - 1, generator=torch.Generator().manual_seed(1))
Mod = Callable[..., torch.Tensor]


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def sliding(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i - j <= WINDOW


def prefix(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j < PREFIX[b]


def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
    return DOCUMENTS[b, i] == DOCUMENTS[b, j]


def real_key(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j < LENGTHS[b]


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + (j - i) * SLOPES[h]


def softcap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return CAP * torch.tanh(score / CAP)


def relative(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + TABLE[i - j + L - 1]


def documents() -> dict[str, Any]:
    return dict(query_segments=DOCUMENTS, key_segments=DOCUMENTS)


def distances() -> torch.Tensor:
    return TABLE[torch.arange(L)[:, None] - torch.arange(L) + L - 1]


# mask_mod, score_mod, and our arguments. Its ALiBi adds slope * (j - i), which equals ours where j
# <= i.
EXAMPLES: dict[str, tuple[Mod | None, Mod | None, Callable[[], dict[str, Any]]]] = {
    "full": (None, None, dict),
    "causal": (causal, None, lambda: dict(causal="top_left")),
    "sliding window": (
        and_masks(causal, sliding),
        None,
        lambda: dict(causal="top_left", window=(WINDOW, None)),
    ),
    "prefix LM": (
        or_masks(prefix, causal),
        None,
        lambda: dict(causal="top_left", prefix_lengths=PREFIX),
    ),
    "document mask": (same_document, None, documents),
    "causal documents": (
        and_masks(causal, same_document),
        None,
        lambda: dict(causal="top_left", **documents()),
    ),
    "padding": (real_key, None, lambda: dict(key_lengths=LENGTHS)),
    "ALiBi": (causal, alibi, lambda: dict(causal="top_left", bias=pt.AlibiBias(SLOPES))),
    "softcap": (None, softcap, lambda: dict(softcap=CAP)),
    "softcap, causal": (causal, softcap, lambda: dict(causal="top_left", softcap=CAP)),
    "relative positions": (None, relative, lambda: dict(bias=distances())),
}


@pytest.mark.parametrize("heads", [H, 2], ids=["heads", "grouped heads"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_equal_flex_attention(name: str, heads: int, backend: str) -> None:
    """Compare output and lse.

    flex_attention has no CPU gradients, so plain code with the same functions gives them.
    """
    mask_mod, score_mod, ours = EXAMPLES[name]
    leaves = [torch.randn(B, n, L, D, requires_grad=True) for n in (H, heads, heads)]
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, B, H, L, L, device="cpu")
    want, want_lse = flex_attention(
        *(t.detach() for t in leaves),
        score_mod=score_mod,
        block_mask=block_mask,
        enable_gqa=heads != H,
        return_lse=True,
    )
    out, lse = pt.attention(*leaves, **ours(), return_lse=True, backend=backend, strict=True)
    plain = written_out(*leaves, mask_mod, score_mod)
    for result in (out, plain):
        assert_same_elements(result, want)
    assert_same_elements(lse, want_lse)
    weights = torch.linspace(-1, 1, D)
    got, expected = (torch.autograd.grad((o * weights).sum(), leaves) for o in (out, plain))
    for mine, theirs in zip(got, expected, strict=True):
        assert_same_elements(mine, theirs, gradient=True)


def written_out(
    q: Any, k: Any, v: Any, mask_mod: Mod | None, score_mod: Mod | None
) -> torch.Tensor:
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    places = torch.meshgrid(*(torch.arange(n) for n in (B, H, L, L)), indexing="ij")
    scores = q @ k.mT * D**-0.5
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*places), -torch.inf)
    return scores.softmax(-1) @ v


def test_examples_differ_from_each_other() -> None:
    q, k, v = (torch.randn(B, H, L, D) for _ in range(3))
    outs = [pt.attention(q, k, v, **ours()) for _, _, ours in EXAMPLES.values()]
    for i, one in enumerate(outs):
        assert all((one - other).abs().max() > 1e-3 for other in outs[:i])
