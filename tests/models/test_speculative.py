# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding with chains and trees of drafts gives the tokens of greedy decoding."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pytransformer import nn
from pytransformer.models import GPT, T5, Decoding, GPTConfig, T5Config, generate

VOCABULARY, NEW, LONGEST = 23, 20, 64
pytestmark = pytest.mark.usefixtures("one_thread")


def example() -> Any:
    path = Path(__file__).resolve().parents[2] / "examples" / "speculative_decoding.py"
    spec = importlib.util.spec_from_file_location("speculative_decoding", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpt(seed: int = 5, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    model = GPT(
        GPTConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            num_layers=2,
            num_heads=4,
            max_length=LONGEST,
            tied=False,
            **changes,
        )
    )
    with torch.no_grad():  # makes tokens differ in likelihood, and early context matter
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(5 if "embedding" in name else 3)
    return model.eval()


def cache_of(model: GPT, kind: str) -> nn.DecoderCache:
    if kind == "contiguous":
        return model.make_cache()
    cache = model.make_paged_cache(80, 4)
    cache.pages._free = torch.randperm(80, generator=torch.Generator().manual_seed(7)).tolist()
    return cache


def greedy(
    model: GPT, prompts: torch.Tensor, lengths: torch.Tensor | None = None
) -> list[list[int]]:
    return generate(model, prompts, lengths, decoding=Decoding(max_new_tokens=NEW)).lists()


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("branches", [1, 3])
def test_trees_give_the_tokens_of_greedy_decoding(
    positions: str, kind: str, branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are the right continuation to some depth, with wrong ones, in any order."""
    model, shown, rng = gpt(positions=positions), example(), random.Random(3)
    prompt = torch.randint(4, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    want = greedy(model, prompt)[0]
    text = prompt[0].tolist()
    whole = text + want

    def guesses(text: list[int], branches: int, depth: int) -> list[list[int]]:
        found = []
        for _ in range(branches):
            right = whole[len(text) : len(text) + rng.randint(0, depth)]
            found.append(right + [rng.randrange(VOCABULARY) for _ in range(depth - len(right))])
        return found

    monkeypatch.setattr(shown, "look_up", guesses)
    cache, calls, cropped = cache_of(model, kind), 0, 0
    with torch.no_grad():
        while len(text) < len(whole):
            text += shown.step(model, cache, text, branches, 4)
            calls, cropped = calls + 1, cropped + (cache.length + 1 < len(text))
    assert text[: len(whole)] == whole
    assert calls <= 0.7 * NEW  # most drafts were accepted
    assert branches == 1 or cropped  # some of them behind rejected ones


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize(
    "config",
    [{}, {"positions": "rotary"}, {"positions": "alibi", "num_kv_heads": 2}, {"window": 6}],
    ids=str,
)
def test_draft_models_give_the_tokens_of_greedy_decoding(kind: str, config: dict[str, Any]) -> None:
    """Prompts have different lengths and separate drafts of a weaker model with its own cache."""
    model, drafter = gpt(**config), gpt(**config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    lengths = torch.tensor([7, 2, 9])
    prompts = torch.randint(4, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    want = greedy(model, prompts, lengths)
    cache, drafts, kept = cache_of(model, kind), cache_of(drafter, kind), 0
    with torch.no_grad():
        token = model(prompts, lengths, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        drafter(prompts, lengths, past_key_values=drafts)
        output = [[t] for t in token[:, 0].tolist()]
        while min(map(len, output)) < NEW:
            held, chain = cache.lengths.clone(), [token]
            for _ in range(4):
                chain.append(
                    drafter(chain[-1], past_key_values=drafts, logits_to_keep=1).logits.argmax(-1)
                )
            read = torch.cat(chain[:-1], 1)  # the certain token and three drafts
            answers = model(read, past_key_values=cache).logits.argmax(-1)
            right = (read[:, 1:] == answers[:, :-1]).int().cumprod(1).sum(1)
            token = answers.gather(1, right[:, None])
            for b, n in enumerate(right.tolist()):
                output[b] += answers[b, : n + 1].tolist()
                kept += n
            cache.crop(held + 1 + right), drafts.crop(held + 1 + right)
    assert [t[:NEW] for t in output] == want
    assert kept > 0 and torch.equal(
        cache.lengths, lengths + torch.tensor([len(t) - 1 for t in output])
    )


def test_rejected_drafts_change_no_later_bit() -> None:
    """This holds for a tree and for a chain."""
    model = gpt()
    prompt = torch.randint(4, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    for kind in ("contiguous", "paged"):
        found = []
        for drafts in (False, True):
            cache = cache_of(model, kind)
            with torch.no_grad():
                model(prompt, past_key_values=cache)
                if drafts:
                    seen = torch.ones(1, 3, 12, dtype=torch.bool).tril(9)
                    seen[:, 2, 10] = False
                    model(prompt[:, :3], seen, past_key_values=cache)
                    cache.crop(9)
                found.append(model(prompt[:, :1], past_key_values=cache).logits)
        assert torch.equal(*found)


def test_tree_paths_equal_plain_sequences() -> None:
    """Each node's logits equal those of its path."""
    model, tree = gpt(positions="rotary"), example().Tree([4, 5])
    for path in ([6, 7, 8], [6, 9], [10], [6, 7, 11]):
        tree.add(path)
    assert (tree.tokens, tree.parents) == ([4, 5, 6, 7, 8, 9, 10, 11], [-1, 0, 1, 2, 3, 2, 1, 3])
    prompt = torch.randint(4, VOCABULARY, (1, 5), generator=torch.Generator().manual_seed(2))
    for kind in ("contiguous", "paged"):
        cache = cache_of(model, kind)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            sees = torch.cat((torch.ones(8, 5, dtype=torch.bool), tree.seen()), 1)
            logits = model(torch.tensor([tree.tokens]), sees[None], past_key_values=cache).logits[0]
            for node in range(8):
                path = [token for token, on in zip(tree.tokens, tree.seen()[node]) if on]
                alone = model(torch.cat((prompt, torch.tensor([path])), 1)).logits[0, -1]
                torch.testing.assert_close(logits[node], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [{"positions": "alibi"}, {"window": 6}], ids=str)
def test_position_dependent_models_refuse_trees(config: dict[str, Any]) -> None:
    model = gpt(**config)
    with pytest.raises(
        ValueError,
        match=(
            r"GPT: a tree of drafts, .* is not read: ALiBi's distances and the window go by the"
            r" places"
        ),
    ):
        model(
            torch.ones(1, 2).long(), torch.ones(1, 2, 2).bool(), past_key_values=model.make_cache()
        )


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_invalid_trees_are_refused(kind: str) -> None:
    model = gpt()
    cache = cache_of(model, kind)
    ids = torch.ones(2, 3, dtype=torch.int64)
    for wrong in (torch.ones(2, 3, 4).bool(), torch.ones(2, 3, 3), torch.ones(1, 3, 3).bool()):
        with pytest.raises(ValueError, match=r"attention_mask of a tree must be bool \(2, 3, 3\)"):
            model(ids, wrong, past_key_values=cache)
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(ids, torch.ones(2, 3, 3).bool())
    with torch.no_grad():
        model(ids, torch.tensor([3, 2]), past_key_values=cache)
    with pytest.raises(ValueError, match="differ in length"):
        model(ids, torch.ones(2, 3, 6).bool(), past_key_values=cache)
    t5 = T5(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            head_dim=8,
            hidden=64,
            num_heads=4,
            num_layers=1,
            max_distance=32,
        )
    )
    with pytest.raises(ValueError, match="T5: a tree of drafts"):
        t5(
            ids,
            decoder_input_ids=ids,
            decoder_attention_mask=torch.ones(2, 3, 3).bool(),
            past_key_values=t5.make_cache(8),
        )
