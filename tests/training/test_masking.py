# SPDX-License-Identifier: Apache-2.0
"""Statistics of BERT's and SpanBERT's masks, spans and pairs; the schedule's formula."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from pytransformer.training import (
    IGNORED,
    SentencePair,
    Vocabulary,
    cooled_down,
    mask_spans,
    mask_tokens,
    masked_collate,
    next_sentence_pairs,
    of_model,
    warmup_cosine,
    warmup_inverse_square_root,
)
from pytransformer.training.masking import span_length_probabilities

VOCABULARY = Vocabulary(1000, 4, frozenset(range(5)))
START, END = 2, 3


def sequences(count, generator):
    for _ in range(count):
        length = int(torch.randint(8, 120, (), generator=generator))
        yield [START, *torch.randint(5, 1000, (length,), generator=generator).tolist(), END]


def within(count, total, share):
    """Return if a binomial count is within 4.5 standard deviations.

    Without a seed a correct program would fail once in 150,000 runs.
    """
    return abs(count - share * total) < 4.5 * math.sqrt(total * share * (1 - share))


@pytest.mark.parametrize("mask", [mask_tokens, mask_spans])
def test_15_percent_are_labels_with_80_10_10_mask_random_kept(mask):
    generator = torch.Generator().manual_seed(1)
    asked = masked = kept = free = units = 0
    for ids in sequences(2500, generator):
        made = mask(ids, VOCABULARY, generator)
        free += len(ids) - 2
        where = [i for i, label in enumerate(made.labels) if label != IGNORED]
        asked += len(where)
        assert all(made.labels[i] == ids[i] for i in where), "a label is the token that was there"
        assert all(made.ids[i] == ids[i] for i in range(len(ids)) if i not in where)
        assert not {made.ids[0], made.ids[-1]} - {START, END}, "special tokens are never masked"
        assert all(made.ids[i] == 4 or made.ids[i] > 4 for i in where), "nor drawn as a replacement"
        for first, last in made.spans or [(i, i) for i in where]:
            units += 1
            masked += made.ids[first] == 4
            kept += made.ids[first : last + 1] == ids[first : last + 1]
            assert {made.ids[i] == 4 for i in range(first, last + 1)} in ({True}, {False}), (
                "a span shares one fate"
            )
    # Each sequence rounds its share randomly: variance at most 0.25 each, so 4.5 deviations are 112
    # tokens.
    assert abs(asked - 0.15 * free) < 4.5 * math.sqrt(0.25 * 2500)
    assert within(masked, units, 0.8)
    assert within(kept, units, 0.1 + 0.1 / 995 * (mask is mask_tokens)), f"{kept} of {units} kept"


def test_span_lengths_are_geometric_up_to_ten():
    expected = span_length_probabilities()
    assert len(expected) == 10 and math.isclose(sum(expected), 1)
    assert math.isclose(expected[3] / expected[2], 0.8)
    assert math.isclose(sum(p * k for k, p in enumerate(expected, 1)), 3.8, abs_tol=0.01), (
        "SpanBERT's mean length"
    )
    generator = torch.Generator().manual_seed(2)
    # The budget truncates a sequence's last span, so only a budget far above a span's length shows
    # the distribution.
    lengths = Counter()
    for ids in [[5] * 4000] * 12:
        spans = mask_spans(ids, VOCABULARY, generator).spans
        lengths.update(last - first + 1 for first, last in spans[:-1])
    total = sum(lengths.values())
    assert total > 1500 and max(lengths) == 10
    for length, probability in enumerate(expected, 1):
        assert within(lengths[length], total, probability), (
            length,
            lengths[length] / total,
            probability,
        )


def test_spans_avoid_each_other_and_special_tokens():
    generator = torch.Generator().manual_seed(3)
    for ids in sequences(200, generator):
        spans = sorted(mask_spans(ids, VOCABULARY, generator, share=0.5).spans)
        assert all(second[0] - first[1] >= 2 for first, second in itertools.pairwise(spans)), (
            "a boundary token on each side"
        )
        assert spans[0][0] >= 1 and spans[-1][1] <= len(ids) - 2
    assert mask_spans([START, END], VOCABULARY, generator).labels == [IGNORED, IGNORED]
    assert mask_tokens([START, END], VOCABULARY, generator).labels == [IGNORED, IGNORED]
    assert (
        sum(
            label != IGNORED for label in mask_tokens([START, 9, END], VOCABULARY, generator).labels
        )
        == 1
    )


def test_masked_batches_differ_between_draws():
    collate = masked_collate(0, VOCABULARY)
    examples = [[START, *range(10, 60), END], [START, *range(10, 30), END]]
    first, second = (collate(examples, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert first["input_ids"].shape == first["labels"].shape == (2, 52)
    assert first["attention_mask"].sum(1).tolist() == [52, 22]
    assert not torch.equal(first["labels"], second["labels"])
    assert (first["labels"][1, 22:] == IGNORED).all()


def test_batches_contain_the_inputs_of_berts_heads():
    """Pairs have segments and labels, spans the tokens around them.

    BERT's losses accept the batch directly.
    """
    from pytransformer.models import BERT, BERTConfig

    pair = SentencePair([START, 9, 8, END, 7, 6, 5, 9, 8, 7, 6, 5, END], [0] * 4 + [1] * 9, 1)
    short = SentencePair([START, 9, END, 7, END], [0] * 3 + [1] * 2, 0)
    batch = masked_collate(0, VOCABULARY, mask_spans)(
        [pair, short], torch.Generator().manual_seed(1)
    )
    assert batch["token_type_ids"].tolist()[1] == [0, 0, 0, 1, 1] + [0] * 8
    assert batch["next_sentence_label"].tolist() == [1, 0]
    asked = (batch["labels"] != IGNORED).nonzero()
    assert len(asked) >= 2
    for row, i in asked.tolist():
        left, right = batch["span_bounds"][row, i].tolist()
        assert (
            left < i < right
            and batch["labels"][row, left] == batch["labels"][row, right] == IGNORED
        )
    small = dict(vocab_size=1000, d_model=16, num_layers=1, num_heads=2, hidden=16, max_length=16)
    model = BERT(BERTConfig(heads=("mlm", "nsp", "boundary"), **small))
    loss, count = of_model(model, batch)
    assert count == len(asked) and loss.isfinite()


def test_next_sentence_pairs_have_half_true_labels():
    documents = [[[10 * d + s] * 3 for s in range(9)] for d in range(1, 120)]
    pairs = next_sentence_pairs(documents, START, END, torch.Generator().manual_seed(4))
    assert len(pairs) == 8 * 119
    for pair in pairs:
        assert pair.ids[0] == START and pair.ids[4] == pair.ids[8] == END
        assert pair.segments == [0] * 5 + [1] * 4
        assert (pair.ids[5] == pair.ids[1] + 1) == (pair.label == 0), (
            "a random sentence comes from another document"
        )
    assert within(sum(pair.label for pair in pairs), len(pairs), 0.5)
    with pytest.raises(ValueError, match="at least two documents with sentences, got 1"):
        next_sentence_pairs([[[1]], []], START, END, torch.Generator())


def test_schedule_equals_the_paper():
    rate = warmup_inverse_square_root(512, 4000)
    assert math.isclose(rate(4000), 512**-0.5 * 4000**-0.5)
    assert math.isclose(rate(1000), rate(4000) / 4), "linear in the warm-up"
    assert math.isclose(rate(16000), rate(4000) / 2), "then as the inverse square root"
    assert max(range(1, 20_000), key=rate) == 4000
    assert math.isclose(warmup_inverse_square_root(512, 4000, 3.0)(77), 3 * rate(77))
    with pytest.raises(ValueError, match="at least 1, got 512 and 0"):
        warmup_inverse_square_root(512, 0)


def test_cooldown_ends_at_zero():
    flat = cooled_down(lambda step: 2.0, 100, share=0.2)
    assert (
        [flat(1), flat(80)] == [2.0, 2.0]
        and flat(100) == pytest.approx(2 / 21)
        and flat(101) == 0.0
    )
    assert flat(90) == pytest.approx(2 * 11 / 21)


def test_cosine_schedule_equals_its_formula():
    rate = warmup_cosine(1e-3, 10, 110, floor=1e-4)
    assert [rate(5), rate(10), rate(110), rate(999)] == pytest.approx([5e-4, 1e-3, 1e-4, 1e-4])
    assert rate(60) == pytest.approx(5.5e-4)
    with pytest.raises(ValueError, match="between 0 and steps - 1 = 9, got 10"):
        warmup_cosine(1e-3, 10, 10)
