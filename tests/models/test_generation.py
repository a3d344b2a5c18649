# SPDX-License-Identifier: Apache-2.0
"""Generation: equal tokens with and without cache and in any batch; beam search; sampling."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from pytransformer.models import (
    GPT,
    T5,
    Decoding,
    GPTConfig,
    T5Config,
    Transformer,
    TransformerConfig,
    generate,
)
from pytransformer.models.generation import filtered
from support.models import LOGITS, assert_same_logits

VOCABULARY, STOP = 23, 3


def gpt(**changes):
    torch.manual_seed(5)
    small = dict(
        vocab_size=VOCABULARY,
        d_model=32,
        num_layers=2,
        num_heads=4,
        max_length=48,
        tied=False,
        **changes,
    )
    return _sharpened(GPT(GPTConfig(**small)))


def transformer(**changes):
    torch.manual_seed(6)
    small = dict(
        vocab_size=VOCABULARY,
        d_model=32,
        hidden=64,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
    )
    return _sharpened(
        Transformer(
            TransformerConfig(max_length=48, start_token_id=2, tied=False, **small, **changes)
        )
    )


def t5(**changes):
    torch.manual_seed(8)
    small = dict(
        vocab_size=VOCABULARY,
        d_model=32,
        head_dim=8,
        hidden=64,
        num_heads=4,
        num_layers=2,
        max_distance=32,
    )
    return T5(T5Config(start_token_id=2, **small, **changes)).eval()


def _sharpened(model):
    """Return a model with weights so large that tokens differ and early context matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(5 if "embedding" in name else 3)
    return model.eval()


MODELS = {
    "gpt": gpt,
    "gpt alibi": lambda: gpt(positions="alibi"),
    "gpt rotary": lambda: gpt(positions="rotary"),
    "gpt grouped": lambda: gpt(num_kv_heads=2, window=6),
    "t5": t5,
    "transformer": transformer,
    "transformer pre-norm": lambda: transformer(norm="pre"),
}
HOW = {
    "greedy": {},
    "beams": {"beams": 3},
    "drawn": {"sample": True, "temperature": 0.9, "top_k": 9, "top_p": 0.95},
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture
def inputs(model, prompts):
    """Return prompts for a decoder, or padded sources for an encoder-decoder.

    Source positions count from the first column, so padding is at the end.
    """
    return tuple(t.flip(1) for t in prompts) if hasattr(model, "encode") else prompts


@pytest.fixture
def prompts():
    """Return (ids, mask) of three sequences padded on the left."""
    ids = torch.randint(4, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) >= torch.tensor([0, 4, 7])[:, None]
    return ids.masked_fill(~mask, 0), mask.long()


@pytest.mark.parametrize("kind", ["contiguous", "paged", "pages of 4, shuffled"])
@pytest.mark.parametrize("how", HOW)
def test_cache_changes_no_token(model, inputs, how, kind):
    """9 beams of 24 tokens never use more pages of 4 than without sharing, 6 each."""
    settings = dict(HOW[how], max_new_tokens=15, stop=(STOP,))
    seeded = lambda **more: generate(
        model, *inputs, **settings, **more, generator=torch.Generator().manual_seed(2)
    )
    cache = kind
    if kind.startswith("pages"):
        cache = model.make_paged_cache(9 * 6, page_size=4)
        cache.pages._free = torch.randperm(9 * 6).tolist()
    with_cache, without = seeded(cache=cache), seeded(use_cache=False)
    if kind.startswith("pages"):
        assert cache.pages.available == 9 * 6
        assert not cache.pages.tables
    assert with_cache.lists() == without.lists()
    assert_same_logits(with_cache.scores, without.scores)
    scores = with_cache.scores
    apart = (scores - scores[:1]).abs().max()
    assert apart > 10 * LOGITS * max(1.0, scores.abs().max()), (
        "prompts that make no difference prove little"
    )


@pytest.mark.parametrize("how", ["greedy", "beams"])
def test_batches_equal_single_sequences(model, inputs, how):
    settings = dict(HOW[how], max_new_tokens=12, stop=(STOP,))
    together = generate(model, *inputs, **settings).lists()
    for ids, mask, tokens in zip(*inputs, together):
        alone = generate(model, ids[mask.bool()][None], **settings)
        assert alone.lists() == [tokens]


def test_greedy_selects_the_likeliest_token_and_stops(model, prompts):
    ids = prompts[0][:1]
    (tokens,) = generate(model, ids, max_new_tokens=10).lists()
    assert len(tokens) == 10
    encoder = hasattr(model, "encode")
    read = torch.full((1, 1), 2) if encoder else ids
    for token in tokens:
        logits = (model(ids, decoder_input_ids=read) if encoder else model(read)).logits
        assert logits[0, -1].argmax() == token
        read = torch.cat([read, torch.tensor([[token]])], 1)
    stop = tokens[4]
    stopped = generate(model, ids, max_new_tokens=10, stop=(stop, 99))
    assert stopped.lists() == [tokens[: tokens.index(stop)]]
    assert stopped.lengths.tolist() == [tokens.index(stop)]
    score = generate(model, ids, max_new_tokens=tokens.index(stop) + 1).scores
    torch.testing.assert_close(stopped.scores, score)


def _score(model, source, tokens, how):
    """Return log p of these tokens and the stop token by one teacher-forced call.

    It includes the length penalty.
    """
    read = torch.tensor([[2, *tokens]])
    logits = model(source, decoder_input_ids=read).logits[0].log_softmax(-1)
    output = [*tokens, STOP]
    return (
        sum(logits[i, t].item() for i, t in enumerate(output))
        / ((5 + len(output)) / 6) ** how.length_penalty
    )


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_beam_search_equals_exhaustive_search(alpha):
    """The beams cover every prefix, so nothing is pruned."""
    torch.manual_seed(3)
    config = TransformerConfig(
        vocab_size=5, d_model=16, hidden=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1
    )
    model = _sharpened(Transformer(config)).eval()
    model.config.__dict__["start_token_id"] = 2
    source = torch.tensor([[1, 4, 0, 2]])
    how = Decoding(beams=64, max_new_tokens=4, stop=(STOP,), length_penalty=alpha)
    others = [0, 1, 2, 4]
    ended = {
        t: _score(model, source, t, how)
        for n in range(4)
        for t in itertools.product(others, repeat=n)
    }
    for t in itertools.product(others, repeat=4):  # truncated at the max length: no stop token
        logits = (
            model(source, decoder_input_ids=torch.tensor([[2, *t[:-1]]])).logits[0].log_softmax(-1)
        )
        ended[t] = (
            sum(logits[i, token].item() for i, token in enumerate(t)) / ((5 + 4) / 6) ** alpha
        )
    best = max(ended, key=ended.__getitem__)
    found = generate(model, source, decoding=how)
    assert found.lists() == [list(best)]
    assert_same_logits(found.scores, torch.tensor([ended[best]]))


class _Table(torch.nn.Module):
    """A language model in which the next token depends on the last token alone."""

    def __init__(self, following):
        super().__init__()
        self.logits = torch.tensor(following).log()

    def forward(self, input_ids, past_key_values, logits_to_keep):
        return SimpleNamespace(logits=self.logits[input_ids])


def test_ended_beams_make_room_for_the_next_best():
    """Stop has 0.4, A 0.3, B 0.29: with two beams A and B continue beside the ended one.

    B wins by the length penalty.
    """
    stop, a, b = 0, 1, 2
    model = _Table(
        [[1, 0, 0, 0, 0], [0.2] * 5, [0.99, 0.01, 0, 0, 0], [0.4, 0.3, 0.29, 0.01, 0], [0.2] * 5]
    )
    settings = dict(max_new_tokens=2, stop=(stop,), beams=2, use_cache=False)
    assert generate(model, torch.tensor([[3]]), length_penalty=4.0, **settings).lists() == [[b]]
    assert generate(model, torch.tensor([[3]]), length_penalty=0.0, **settings).lists() == [[]]
    assert a not in generate(model, torch.tensor([[3]]), length_penalty=4.0, **settings).tokens


def test_more_beams_never_score_worse_than_greedy_here():
    model, source = transformer(), torch.tensor([[5, 6, 7, 8]])
    greedy = generate(model, source, max_new_tokens=8, stop=(STOP,))
    beam = generate(model, source, max_new_tokens=8, stop=(STOP,), beams=8, length_penalty=0.0)
    assert beam.scores.item() >= greedy.scores.item() - 1e-4


def test_samples_follow_the_distribution():
    model = gpt()
    ids = torch.tensor([[7, 8, 9]]).expand(4000, 3)
    drawn = generate(
        model,
        ids,
        max_new_tokens=1,
        sample=True,
        temperature=3.0,
        generator=torch.Generator().manual_seed(1),
    )
    expected = (model(ids[:1]).logits[0, -1] / 3).softmax(-1)
    share = torch.bincount(drawn.tokens[:, 0], minlength=VOCABULARY) / 4000
    assert ((share - expected).abs() < 4.5 * (expected * (1 - expected) / 4000).sqrt() + 1e-9).all()


def test_filters_select_top_k_and_top_p():
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
    kept = lambda k, p: (filtered(logits, k, p) > -torch.inf)[0].tolist()
    assert kept(2, None) == [True, False, True, False]
    assert kept(None, 0.5) == [
        True,
        False,
        True,
        False,
    ], "the token that crosses the threshold stays"
    assert kept(None, 0.01) == [True, False, False, False], "the likeliest always stays"
    assert kept(3, 0.95) == [True, False, True, True]
    assert kept(99, 1.0) == [True] * 4


def test_prefix_is_bidirectional_in_generation(prompts):
    model, ids = gpt(), prompts[0][:1]
    prefix = torch.tensor([9])
    cached = generate(model, ids, max_new_tokens=8, prefix_lengths=prefix).lists()
    assert (
        cached
        == generate(model, ids, max_new_tokens=8, prefix_lengths=prefix, use_cache=False).lists()
    )
    first = model(ids, prefix_lengths=prefix).logits[0, -1].argmax()
    assert cached[0][0] == first


def test_generation_restores_the_model(prompts):
    model = gpt(dropout=0.5).train()
    assert (
        generate(model, *prompts, max_new_tokens=5).lists()
        == generate(model, *prompts, max_new_tokens=5).lists()
    )
    assert model.training


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"beams": 0}, "beams must be at least 1"),
        ({"sample": True, "temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"sample": True, "top_k": 0}, "top_k must be at least 1, got 0"),
        ({"sample": True, "top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"sample": True, "beams": 2}, "beam search does not draw"),
        ({"top_k": 3}, "for drawing; expected sample=True"),
        ({"max_new_tokens": 41}, "9 tokens and 41 new ones are more than the model's 48 positions"),
    ],
)
def test_invalid_settings_are_refused(prompts, settings, said):
    with pytest.raises(ValueError, match=said):
        generate(gpt(), prompts[0], **settings)


PADDED = {
    "left": [[0, 0, 0, 1, 1, 1], [1] * 6, [0, 0, 0, 0, 0, 1]],
    "right": [[1, 1, 1, 0, 0, 0], [1] * 6, [1, 0, 0, 0, 0, 0]],
    "within": [[1, 0, 1, 0, 0, 1], [1] * 6, [0, 0, 1, 0, 0, 0]],
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("name", ["gpt", "gpt alibi", "gpt grouped"])
def test_padding_may_be_anywhere(name, side, how):
    """Each prompt equals its tokens alone: the mask becomes lengths, which hide padding."""
    model, mask = MODELS[name](), torch.tensor(PADDED[side])
    tokens = torch.randint(4, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(4))
    settings = dict(HOW[how], max_new_tokens=9, stop=(STOP,))
    run = lambda ids, mask: generate(
        model, ids, mask, **settings, generator=torch.Generator().manual_seed(3)
    )
    ids = torch.zeros_like(tokens)
    for b, real in enumerate(mask.bool()):
        ids[b, real] = tokens[b, : real.sum()]
    together = run(ids, mask)
    lengths = mask.sum(1)
    assert together.lists() == run(tokens, lengths).lists()
    assert (
        together.lists()
        == generate(
            model,
            ids,
            mask,
            **settings,
            use_cache=False,
            generator=torch.Generator().manual_seed(3),
        ).lists()
    )
    if how != "drawn":  # one generator draws for the batch
        assert together.lists() == [
            run(t[None, :n], None).lists()[0] for t, n in zip(tokens, lengths.tolist())
        ]


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_prefix_lengths_count_columns_of_padded_prompts(cache):
    model, ids = gpt(), torch.tensor([[0, 0, 5, 9, 7, 8, 6], [4, 11, 5, 9, 7, 8, 6]])
    mask, prefix = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]), torch.tensor([5, 4])
    together = generate(
        model, ids, mask, prefix_lengths=prefix, max_new_tokens=6, cache=cache
    ).lists()
    assert (
        together[0]
        == generate(model, ids[:1, 2:], prefix_lengths=torch.tensor([3]), max_new_tokens=6).lists()[
            0
        ]
    )
    assert (
        together[1]
        == generate(model, ids[1:], prefix_lengths=prefix[1:], max_new_tokens=6).lists()[0]
    )


def test_caches_can_be_reused_if_empty(prompts):
    model = gpt()
    cache, want = model.make_cache(40), generate(model, *prompts, max_new_tokens=6).lists()
    for rows in (3, 2, 3):
        assert (
            generate(model, *(t[:rows] for t in prompts), max_new_tokens=6, cache=cache).lists()
            == want[:rows]
        )
        assert cache.length == 0
    kept = cache.layers[0].buffers[0]
    generate(model, *prompts, max_new_tokens=6, cache=cache)
    assert cache.layers[0].buffers[0] is kept, "memory is taken once"
    with torch.no_grad():
        model(prompts[0], past_key_values=cache)
    with pytest.raises(ValueError, match="the cache holds 9 positions"):
        generate(model, *prompts, cache=cache)
    cache.free()
    with pytest.raises(ValueError, match="41 positions, but it was made for max_length=40"):
        generate(model, prompts[0], max_new_tokens=33, cache=cache)
    with pytest.raises(
        ValueError,
        match=r"cache must be 'contiguous', 'paged' or a cache of the model, got 'pages'",
    ):
        generate(model, *prompts, cache="pages", max_new_tokens=2)


def test_invalid_prompts_are_refused(prompts):
    ids, mask = prompts
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        generate(gpt(), ids, mask * torch.tensor([[1], [0], [1]]))
    with pytest.raises(
        ValueError,
        match=(
            r"attention_mask must be \(3, 9\) or lengths \(3,\), got torch.int64 of shape \(3, 8\)"
        ),
    ):
        generate(gpt(), ids, mask[:, 1:])
    with pytest.raises(
        ValueError, match=r"input_ids must be \(B, L\) with L > 0, got shape \(3, 0\)"
    ):
        generate(gpt(), ids[:, :0])
    with pytest.raises(ValueError, match="got both: beams"):
        generate(gpt(), ids, decoding=Decoding(), beams=2)
