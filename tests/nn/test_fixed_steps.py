# SPDX-License-Identifier: Apache-2.0
"""Decoding steps without host reads: tokens of ordinary decoding, recorded once and replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import pytransformer as pt
from pytransformer import nn
from pytransformer.models import GPT, T5, GPTConfig, T5Config
from support.device_only import DeviceOnly, HostRead
from support.paths import bits

VOCABULARY, NEW = 23, 7
LENGTHS = torch.tensor([5, 2, 9])
KINDS = {
    "learned": {},
    "rotary": {"positions": "rotary"},
    "alibi, grouped, window": {"positions": "alibi", "num_kv_heads": 2, "window": 6},
}
pytestmark = pytest.mark.usefixtures("one_thread")


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(5)
    model = GPT(
        GPTConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            num_layers=2,
            num_heads=4,
            max_length=24,
            tied=False,
            **changes,
        )
    ).eval()
    with torch.no_grad():  # makes tokens differ in likelihood, and early context matter
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(5 if "embedding" in name else 3)
    return model


def caches(model: GPT) -> dict[str, nn.DecoderCache]:
    """Return caches after prompts of different lengths; pages have any order."""
    made: dict[str, nn.DecoderCache] = {
        "contiguous": model.make_cache(),
        "contiguous, int8": model.make_cache(dtype=torch.int8),
        "paged": model.make_paged_cache(30, 4),
        "paged, e4m3": model.make_paged_cache(30, 4, dtype=torch.float8_e4m3fn),
    }
    for paged in made.values():
        if isinstance(paged, nn.PagedCache):
            paged.pages._free = torch.randperm(
                30, generator=torch.Generator().manual_seed(7)
            ).tolist()
    return made


def prompt(model: GPT, cache: nn.DecoderCache) -> torch.Tensor:
    """Return the first new token of each sequence."""
    ids = torch.randint(4, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return (
            model(ids, LENGTHS, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        )


def step(model: GPT, cache: nn.DecoderCache, token: torch.Tensor) -> None:
    """Write the next token in place of the last one."""
    with torch.no_grad():
        token.copy_(model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1))


def ordinary(model: GPT, kind: str) -> list[torch.Tensor]:
    cache = caches(model)[kind]
    token, found = prompt(model, cache), []
    for _ in range(NEW):
        step(model, cache, token)
        found.append(token.clone())
    return found


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> GPT:
    return gpt(**KINDS[request.param])


@pytest.mark.parametrize("kind", ["contiguous", "contiguous, int8", "paged", "paged, e4m3"])
def test_fixed_steps_give_the_tokens_of_ordinary_steps(model: GPT, kind: str) -> None:
    cache, want = caches(model)[kind], ordinary(model, kind)
    token = prompt(model, cache)
    before = cache.pages.available if isinstance(cache, nn.PagedCache) else 0
    fixed = nn.FixedSteps(cache, NEW)
    for expected in want[:3]:
        step(model, fixed, token)
        assert torch.equal(token, expected)
    fixed.finish()
    assert cache.lengths.tolist() == (LENGTHS + 3).tolist()
    if isinstance(cache, nn.PagedCache):  # unused reservations are returned
        taken = sum(-(-(n + 3) // 4) - -(-n // 4) for n in LENGTHS.tolist())
        assert before - cache.pages.available == taken
    for expected in want[3:5]:  # ordinary steps, and fixed ones again
        step(model, cache, token)
        assert torch.equal(token, expected)
    fixed = nn.FixedSteps(cache, 2)
    for expected in want[5:]:
        step(model, fixed, token)
        assert torch.equal(token, expected)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_recorded_steps_can_be_replayed(model: GPT, kind: str) -> None:
    """The operations of one step run again on the same memory without Python.

    Every later token is right, as in a CUDA graph.
    """
    cache, want = caches(model)[kind], ordinary(model, kind)
    token = prompt(model, cache)
    fixed = nn.FixedSteps(cache, NEW)
    with DeviceOnly(checks=True) as graph:
        step(model, fixed, token)
    assert torch.equal(token, want[0])
    for expected in want[1:]:
        graph.replay()
        assert torch.equal(token, expected)
    fixed.finish()
    assert cache.lengths.tolist() == (LENGTHS + NEW).tolist()


@pytest.mark.parametrize("kind", [pytest.param("contiguous", marks=pytest.mark.slow), "paged"])
def test_steps_compile_to_one_graph(model: GPT, kind: str) -> None:
    cache, want = caches(model)[kind], ordinary(model, kind)
    token = prompt(model, cache)
    fixed = nn.FixedSteps(cache, NEW)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for expected in want:
        compiled(model, fixed, token)
        assert torch.equal(token, expected)
    assert counter.frame_count == 1  # no value of a step is a constant of it
    fixed.finish()
    assert cache.lengths.tolist() == (LENGTHS + NEW).tolist()


class OnMeta(nn.FixedSteps):
    """The same steps on the meta device: a read of a value fails."""

    def __init__(self, cache: nn.DecoderCache, tokens: int) -> None:
        super().__init__(cache, tokens)
        self._lengths, self._room = self._lengths.to("meta"), self._room.to("meta")
        for layer in self.layers:
            layer.held = pt.KeyValues(*(None if t is None else t.to("meta") for t in layer.held))


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("columns", [1, 3])
def test_fixed_steps_read_nothing_on_the_host(model: GPT, kind: str, columns: int) -> None:
    cache = caches(model)[kind]
    prompt(model, cache)
    steps, model = OnMeta(cache, columns), model.to("meta")
    ids = torch.zeros(3, columns, dtype=torch.int64, device="meta")
    with torch.no_grad(), DeviceOnly() as watched:
        out = model(ids, past_key_values=steps, logits_to_keep=1).logits.argmax(-1)
        steps.crop(steps.lengths - 1)  # a rejected draft
    assert out.shape == (3, 1) and out.is_meta
    assert {str(func) for func, *_ in watched.tape} >= {
        "pytransformer.attention_fwd.default",
        "pytransformer.append_kv_fwd.default",
    }


def test_ordinary_steps_read_on_the_host() -> None:
    """The observer detects that ordinary caches read lengths."""
    model = gpt()
    for cache in caches(model).values():
        token = prompt(model, cache)
        with pytest.raises(HostRead), torch.no_grad(), DeviceOnly():
            model(token, past_key_values=cache)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_sequences_may_get_no_token(model: GPT, kind: str) -> None:
    """Lengths on the device select the columns that are tokens; crop selects rejected drafts."""
    plain, cache = (caches(model)[kind] for _ in range(2))
    prompt(model, plain), prompt(model, cache)
    fixed = nn.FixedSteps(cache, 6)
    ids = torch.randint(4, VOCABULARY, (3, 3), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for counts in ([3, 0, 1], [1, 2, 3]):
            lengths = plain.lengths + torch.tensor(counts)
            want = model(ids, lengths, past_key_values=plain, logits_to_keep=1).logits
            got = model(ids, lengths, past_key_values=fixed, logits_to_keep=1).logits
            assert torch.equal(got, want)
            kept = lengths - torch.tensor([1, 0, 1])
            plain.crop(kept), fixed.crop(kept)
    fixed.finish()
    assert torch.equal(cache.lengths, plain.lengths)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_steps_stay_within_their_reservation(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU raises.

    Without checks no other sequence's page is written or read, and finish() raises.
    """
    model = gpt()
    cache = caches(model)[kind]
    token = prompt(model, cache)
    fixed = nn.FixedSteps(cache, 2)
    step(model, fixed, token), step(model, fixed, token)
    with pytest.raises(
        ValueError, match=r"sequence 0 would hold 8 tokens, and there is room for 7"
    ):
        step(model, fixed, token)
    monkeypatch.setattr(nn.FixedSteps, "_check", lambda self, lengths: None)
    held = [bits(t).clone() for layer in fixed.layers for t in layer.held[:2]]
    step(model, fixed, token)
    assert all(
        torch.equal(a, bits(b))
        for a, b in zip(held, [t for layer in fixed.layers for t in layer.held[:2]])
    )
    assert (
        fixed.current.total is not None and fixed.current.total.tolist() == (LENGTHS + 2).tolist()
    )
    with pytest.raises(
        ValueError, match="sequence 0 was given 1 tokens more than there was room for"
    ):
        fixed.finish()
    assert cache.lengths.tolist() == (LENGTHS + 2).tolist()


def test_shared_pages_are_copied_before_the_steps() -> None:
    """Beams that share a half-full page write separate copies."""
    model, want = gpt(), None
    for kind in ("contiguous", "paged"):
        cache = caches(model)[kind]
        token = prompt(model, cache)
        cache.reorder(torch.tensor([0, 0, 2]))
        token = torch.tensor([[4], [5], [6]])
        fixed = nn.FixedSteps(cache, NEW)
        for _ in range(NEW):
            step(model, fixed, token)
        want = token.clone() if want is None else want
        assert torch.equal(token, want)


def test_cross_attention_keys_remain() -> None:
    torch.manual_seed(8)
    model = T5(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            head_dim=8,
            hidden=64,
            num_heads=4,
            num_layers=2,
            max_distance=32,
        )
    ).eval()
    source, start = torch.randint(4, VOCABULARY, (2, 6)), torch.full((2, 1), 2)
    with torch.no_grad():
        memory, found = model.encode(source), []
        for fixes in (False, True):
            cache: Any = model.make_cache(12)
            logits = [
                model(decoder_input_ids=start, encoder_outputs=memory, past_key_values=cache).logits
            ]
            used = nn.FixedSteps(cache, 4) if fixes else cache
            for i in range(4):
                logits.append(
                    model(
                        decoder_input_ids=start + i, encoder_outputs=memory, past_key_values=used
                    ).logits
                )
            found.append(torch.stack(logits))
    assert torch.allclose(*found, atol=1e-5)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_unsupported_caches_are_refused(kind: str) -> None:
    model = gpt()
    cache = caches(model)[kind]
    with pytest.raises(ValueError, match="run a prompt first"):
        nn.FixedSteps(cache, 1)
    token = prompt(model, cache)
    with pytest.raises((ValueError, nn.OutOfPages), match=r"max_length=24|more pages"):
        nn.FixedSteps(cache, 100)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        nn.FixedSteps(cache, 0)
    fixed = nn.FixedSteps(cache, 2)
    for refused in (
        lambda: fixed.reorder(torch.tensor([0])),
        fixed.free,
        lambda: nn.FixedSteps(fixed, 1),
    ):
        with pytest.raises(ValueError, match="finish"):
            refused()
    with pytest.raises(ValueError, match="made for 3 sequences, got 2"):
        step(model, fixed, token[:2])
    with pytest.raises(ValueError, match="as lengths"):
        model(token, torch.ones(3, 4), past_key_values=fixed)
    fixed.finish()
    for again in (fixed.finish, lambda: step(model, fixed, token)):
        with pytest.raises(ValueError, match="finished"):
            again()
