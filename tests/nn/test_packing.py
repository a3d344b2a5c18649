# SPDX-License-Identifier: Apache-2.0
"""Stacks skip padding at the end of sequences: equal results at real tokens, zeros elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytransformer import nn
from pytransformer.nn.packing import Packing, select, spread
from pytransformer.ops._core.registry import trace
from support.models import assert_same_gradient, assert_same_logits
from support.small_models import build

LENGTHS = {"input_ids": [9, 2, 5], "decoder_input_ids": [3, 7, 1]}
NAMES = ["Transformer", "Transformer-pre", "T5", "T5-v1.1", "BERT", "GPT", "GPT-alibi"]


def mask_of(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def batch_of(
    name: str, *, as_lengths: bool = False
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs padded at the end, and a mask of the real outputs."""
    sides = (
        ("input_ids", "decoder_input_ids")
        if name.startswith(("T5", "Transformer"))
        else ("input_ids",)
    )
    batch: dict[str, torch.Tensor] = {}
    for side in sides:
        mask = mask_of(LENGTHS[side])
        batch[side] = torch.randint(3, 29, mask.shape)
        lengths = torch.tensor(LENGTHS[side])
        batch[side.replace("input_ids", "attention_mask")] = lengths if as_lengths else mask
    return batch, mask_of(LENGTHS[sides[-1]]).bool()


def stacks(model: torch.nn.Module) -> list[nn.Stack]:
    return [m for m in model.modules() if isinstance(m, nn.Stack)]


def run(
    model: Any, batch: dict[str, torch.Tensor], real: torch.Tensor, packs: bool
) -> tuple[Any, list[torch.Tensor], set[str]]:
    for stack in stacks(model):
        stack.packs = packs
    model.zero_grad()
    labels = torch.randint(
        3, 29, real.shape, generator=torch.Generator().manual_seed(2)
    ).masked_fill(~real, -100)
    with trace() as ran:
        out = model(**batch, labels=labels)
        out.loss.backward()
    return (
        out,
        [p.grad for p in model.parameters() if p.grad is not None],
        {op for op, _ in ran if op.startswith("attention")},
    )


@pytest.mark.parametrize("as_lengths", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_results_at_real_tokens_equal_padded_ones(name: str, as_lengths: bool):
    model = build(name).eval()
    batch, real = batch_of(name, as_lengths=as_lengths)
    out, grads, ops = run(model, batch, real, packs=True)
    expected, expected_grads, plain = run(model, batch, real, packs=False)
    assert ops == {"attention_varlen_fwd", "attention_varlen_bwd"} and plain == {
        "attention_fwd",
        "attention_bwd",
    }
    assert_same_logits(out.last_hidden_state[real], expected.last_hidden_state[real])
    assert not out.last_hidden_state[~real].any()
    assert_same_logits(out.loss, expected.loss)
    assert len(grads) == len(expected_grads)
    # Gradients that are zero up to rounding (biases of keys) have no direction to compare.
    compared = [(g, e) for g, e in zip(grads, expected_grads) if e.norm() > 1e-6]
    assert len(compared) > len(grads) // 2
    for grad, other in compared:
        assert_same_gradient(grad, other)


def ops_of(model: Any, batch: dict[str, torch.Tensor]) -> set[str]:
    with torch.no_grad(), trace() as ran:
        model(**batch).last_hidden_state  # noqa: B018
    return {op for op, _ in ran if op.startswith("attention")}


@pytest.mark.parametrize(
    ("why", "mask"),
    [
        ("no padding", mask_of([9, 9, 9])),
        ("too little of it", mask_of([9, 9, 8])),
        ("at the start", mask_of([9, 2, 5]).flip(1)),
        ("a hole", torch.tensor([[1, 1, 1, 0, 0, 1, 0, 0, 0]]).expand(3, 9)),
    ],
)
def test_unsuitable_masks_are_not_packed(why: str, mask: torch.Tensor):
    model = build("BERT").eval()
    assert ops_of(model, {"input_ids": torch.randint(3, 29, (3, 9)), "attention_mask": mask}) == {
        "attention_fwd"
    }, why


def test_prefixes_caches_and_other_blocks_keep_padding():
    mask = mask_of([9, 2, 5])
    ids = torch.randint(3, 29, (3, 9))
    gpt = build("GPT").eval()
    batch = {"input_ids": ids, "attention_mask": mask}
    assert ops_of(gpt, batch) == {"attention_varlen_fwd"}
    assert ops_of(gpt, {**batch, "prefix_lengths": torch.tensor([3, 1, 2])}) == {"attention_fwd"}
    assert ops_of(gpt, {**batch, "past_key_values": gpt.make_cache(12)}) == {"attention_fwd"}
    assert all(not stack.packs for stack in stacks(build("FNet")))
    source_left = {
        "input_ids": ids,
        "attention_mask": mask.flip(1),
        "decoder_input_ids": ids,
        "decoder_attention_mask": mask,
    }
    assert ops_of(build("T5").eval(), source_left) == {"attention_fwd"}, (
        "the decoder's context is padded at the start"
    )


@pytest.mark.parametrize("name", ["BERT", "GPT", "Transformer", "T5"])
def test_padding_with_labels_is_computed(name: str):
    """Labels other than -100 at padding contribute to the loss, as in Hugging Face."""
    model = build(name).eval()
    batch, real = batch_of(name)
    labels = torch.randint(3, 29, real.shape)
    with trace() as ran:
        out = model(**batch, labels=labels)
    used = [op for op, _ in ran if op.startswith("attention")][
        -1
    ]  # the decoder's, or the only stack's
    assert used == "attention_fwd"
    assert out.last_hidden_state[~real].any()


def test_taps_see_padded_shapes():
    model = build("BERT").eval()
    batch, _ = batch_of("BERT")
    with nn.taps(model, "encoder.blocks.0", "encoder.blocks.0.mixing") as seen:
        model(**batch)
    assert seen["encoder.blocks.0"].x.shape[:2] == (3, 9)
    assert seen["encoder.blocks.0.mixing"].weights().shape == (3, 4, 9, 9)
    assert all(stack.packs for stack in stacks(model))


def test_traces_keep_padding():
    """The real tokens are unknown while a graph is traced."""
    model = build("BERT").eval()
    batch, real = batch_of("BERT")
    with torch.no_grad():
        expected = model(**batch).last_hidden_state[real]
        exported = torch.export.export(
            model.encoder,
            (torch.randn(3, 9, 16), {"attn_mask": batch["attention_mask"].bool()[:, None, None]}),
        )
        assert "attention_varlen" not in exported.graph_module.code
        compiled = torch.compile(
            lambda: model(**batch).last_hidden_state, fullgraph=True, backend="eager"
        )
        assert_same_logits(compiled()[real], expected)


def test_empty_rows_and_missing_labels_give_finite_states():
    model = build("GPT").train()
    mask = mask_of([9, 0, 4])
    out = model(torch.randint(3, 29, (3, 9)), mask, labels=torch.full((3, 9), -100))
    assert out.loss.isnan() and out.last_hidden_state.isfinite().all()


def test_pack_and_unpack_are_adjoint():
    x, rows = torch.randn(7, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 2, 5])
    assert torch.equal(select(x, rows), x[rows])
    torch.autograd.gradcheck(lambda x: select(x, rows), (x,))
    torch.autograd.gradgradcheck(lambda x: select(x, rows).square(), (x,))
    torch.autograd.gradcheck(lambda x: spread(select(x, rows), rows, 9), (x,))


def test_unpack_inverts_pack():
    x = torch.randn(3, 9, 4)
    mask = mask_of([9, 2, 5]).bool()
    packing = Packing.of({"attn_mask": mask[:, None, None]}, x)
    assert packing.longest == 9 and packing.offsets.tolist() == [0, 9, 11, 16]
    assert torch.equal(packing.pack(x), x[mask])
    assert torch.equal(packing.unpack(packing.pack(x)), x * mask[..., None])
