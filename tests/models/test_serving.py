# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: a request's tokens equal those of generate, whatever joins and leaves."""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from pytransformer.models import GPT, T5, Batcher, Decoding, GPTConfig, T5Config, generate
from support.models import assert_same_logits
from support.pages import poison_free_rows

VOCABULARY = 23


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(5)
    small: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        d_model=32,
        num_layers=2,
        num_heads=4,
        max_length=48,
        tied=False,
        **changes,
    )
    model = GPT(GPTConfig(**small))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(5 if "embedding" in name else 3)
    return model.eval()


MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "alibi": {"positions": "alibi"},
    "grouped, window": {"num_kv_heads": 2, "window": 6},
}


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.mark.parametrize(
    ("slots", "piece", "pages", "share"),
    [(1, 3, 12, True), (4, 5, 20, True), (16, 100, 200, False), (5, 1, 14, True)],
)
@pytest.mark.parametrize("name", MODELS)
def test_each_request_equals_generate(
    name: str, slots: int, piece: int, pages: int, share: bool
) -> None:
    """Prompts share prefixes, drawn and greedy; requests exceed slots and tokens exceed pages.

    Free rows are NaN before each step.
    """
    model, rng = gpt(**MODELS[name]), random.Random(slots)
    cache = model.make_paged_cache(pages, page_size=4)
    batcher = Batcher(model, cache, slots=slots, piece=piece, share=share)
    asked: dict[int, tuple[list[int], Decoding]] = {}
    found: dict[int, Any] = {}
    shared = most = 0
    while batcher.busy or len(asked) < 30:
        for _ in range(min(rng.choice([0, 1, 3]), 30 - len(asked))):
            prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15][: rng.randint(0, 9)] + [
                rng.randrange(4, VOCABULARY) for _ in range(rng.randint(1, 12))
            ]
            drawn: dict[str, Any] = (
                {"sample": True, "temperature": 0.9, "top_k": 9} if rng.random() < 0.5 else {}
            )
            how = Decoding(max_new_tokens=rng.randint(1, 14), stop=(3,), **drawn)
            asked[batcher.submit(prompt, how, generator=seeded(len(asked)))] = prompt, how
        poison_free_rows(cache)
        for finished in batcher.step():
            assert finished.request not in found
            found[finished.request] = finished
        most = max(most, len(batcher._active))
        shared += sum(count > 1 for count in cache.pages.counts)
        assert len(batcher._active) <= slots
    assert found.keys() == asked.keys()
    for number, (prompt, how) in asked.items():
        alone = generate(model, torch.tensor([prompt]), decoding=how, generator=seeded(number))
        assert alone.lists() == [found[number].tokens], number
        assert_same_logits(torch.tensor([found[number].score]), alone.scores)
    assert cache.pages.available == pages
    assert not cache.pages.tables
    assert (most > 1) == (slots > 1)
    assert (shared > 0) == (share and slots > 1)


def test_long_prompts_do_not_block_other_requests() -> None:
    model = gpt()
    batcher = Batcher(model, model.make_paged_cache(40, page_size=4), slots=2, piece=2)
    short = batcher.submit([5], max_new_tokens=6)
    batcher.step()
    batcher.submit([6] * 30, max_new_tokens=1)
    ends = [finished.request for _ in range(5) for finished in batcher.step()]
    assert ends == [short], "15 pieces of the other have not been read by then"


def test_unservable_requests_are_refused_immediately() -> None:
    model = gpt()
    batcher = Batcher(model, model.make_paged_cache(3, page_size=4), slots=2)
    refused: list[tuple[list[int], dict[str, Any], str]] = [
        ([], {}, "the prompt has no tokens"),
        ([5], {"beams": 2}, "expected beams=1 and use_cache=True"),
        ([5], {"use_cache": False}, "expected beams=1 and use_cache=True"),
        ([5] * 8, {"max_new_tokens": 6}, "13 positions need 4 pages of 4, and the cache has 3"),
        ([5] * 8, {"max_new_tokens": 42}, "49 positions, and the model has 48"),
        ([5], {"decoding": Decoding(), "stop": (3,)}, "got both: stop"),
    ]
    refused += [
        ([5, VOCABULARY], {}, "ids must be from 0 to 22, the end of the vocabulary, got 23"),
        ([-1, 5], {}, "ids must be from 0 to 22, the end of the vocabulary, got -1"),
        ([5, 2**40], {}, f"got {2**40}"),
    ]
    for prompt, settings, output in refused:
        with pytest.raises(ValueError, match=output):
            batcher.submit(prompt, **settings)
    for wrong in (
        [5.0],
        ["5"],
        [[5]],
        5,
        torch.tensor([5.0]),
        torch.tensor([[5]]),
        torch.tensor(5),
    ):
        with pytest.raises(TypeError, match=r"Batcher\.submit: prompt must be"):
            batcher.submit(wrong)
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator or None, got 7"):
        batcher.submit([5], sample=True, generator=7)
    assert not batcher.busy
    assert batcher.submit(torch.tensor([5, 22]), max_new_tokens=1) == 0
    with pytest.raises(ValueError, match="T5 answers sources"):
        Batcher(
            T5(T5Config(vocab_size=9, d_model=8, head_dim=4, hidden=8, num_layers=1, num_heads=2)),
            batcher.cache,
        )
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        Batcher(model, batcher.cache, slots=0)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_repeated_prompts_reuse_pages(length: int) -> None:
    """The last token is always computed because its logits are needed.

    A prompt of 8 tokens in pages of 4 reuses one page, not two.
    """
    model = gpt()
    batcher = Batcher(model, model.make_paged_cache(8, page_size=4))
    prompt, output, read = list(range(4, 4 + length)), [], []
    for _ in range(2):
        batcher.submit(prompt, max_new_tokens=3)
        batcher._admit()
        read.append(batcher._active[0].read)
        while batcher.busy:
            output += [finished.tokens for finished in batcher.step()]
    assert read == [0, 4 * ((length - 1) // 4)]
    assert output == generate(model, torch.tensor([prompt, prompt]), max_new_tokens=3).lists()


def test_cancel_returns_the_tokens_so_far() -> None:
    """One request runs, one waits behind another, one has ended."""
    model = gpt()
    batcher = Batcher(model, model.make_paged_cache(8, page_size=4), slots=1)
    running, waiting, last = (batcher.submit([token], max_new_tokens=6) for token in (5, 6, 7))
    batcher.step()
    assert batcher.cancel(running) and batcher.cancel(waiting)
    ended = {finished.request: finished for finished in batcher.step()}
    assert ended.keys() == {running, waiting}
    assert all(isinstance(finished.error, CancelledError) for finished in ended.values())
    alone = generate(model, torch.tensor([[5], [7]]), max_new_tokens=6).lists()
    assert ended[running].tokens == alone[0][:1] and ended[waiting].tokens == []
    assert not batcher.cancel(running) and not batcher.cancel(99)
    ends = []
    while batcher.busy:
        ends += batcher.step()
    assert [(f.request, f.tokens, f.error) for f in ends] == [(last, alone[1], None)]
    assert batcher.cache.pages.available == 8 and not batcher._cancelled


def test_submodules_return_to_their_modes() -> None:
    model = gpt().train()
    model.decoder.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    batcher = Batcher(model, model.make_paged_cache(8, page_size=4))
    batcher.submit([5], max_new_tokens=1)
    batcher.step()
    assert [module.training for module in model.modules()] == modes
    generate(model, torch.tensor([[5]]), max_new_tokens=1)
    assert [module.training for module in model.modules()] == modes


def test_threads_get_one_result_per_request() -> None:
    model = gpt()
    batcher = Batcher(model, model.make_paged_cache(40, page_size=4), slots=8)
    numbers: list[int] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            number = batcher.submit([rng.randrange(4, VOCABULARY)], max_new_tokens=2)
            numbers.append(number)
            if rng.random() < 0.3:
                batcher.cancel(rng.choice([number, number // 2]))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        ended = []
        while batcher.busy or any(thread.is_alive() for thread in threads):
            ended += batcher.step()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(numbers) == sorted(finished.request for finished in ended) == list(range(160))
    assert any(finished.error for finished in ended) and not all(
        finished.error for finished in ended
    )
    assert batcher.cache.pages.available == 40
