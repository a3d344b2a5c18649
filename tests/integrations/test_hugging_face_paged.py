# SPDX-License-Identifier: Apache-2.0
"""transformers' continuous batching on our attention: equal tokens, keys read in their pages.

Unwritten pages contain NaN.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import trace
from support.hugging_face import FAMILIES

pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators",
    reason="needs transformers >= 5.23",
)
pytestmark = pytest.mark.usefixtures("one_thread")

BEGINNING = [5, 6, 7, 8, 9, 10, 11, 12]
PROMPTS = [
    [5, 6, 7, 8, 9],
    [4, 4, 9],
    [*BEGINNING, *range(13, 27)],
    [*BEGINNING, 30],
    [*BEGINNING, 31, 32],
    [17],
    list(range(20, 49)),
]


@pytest.fixture
def paged(hugging_face: Any) -> ModuleType:
    from pytransformer.integrations.hugging_face import paged

    return paged


def tokens(model: Any, **settings: Any) -> list[list[int]]:
    """Return the tokens of seven requests over pages of 4, too few for all.

    A step has up to 16 tokens.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    how = GenerationConfig(max_new_tokens=9, eos_token_id=-1, pad_token_id=0, **settings)
    batching = ContinuousBatchingConfig(
        page_size=4, num_blocks=24, max_batch_tokens=16, seed=3 if settings["do_sample"] else None
    )
    output = model.generate_batch(
        PROMPTS, generation_config=how, continuous_batching_config=batching, progress_bar=False
    )
    assert len(output) == len(PROMPTS)
    return [output[f"req_{i}"].generated_tokens for i in range(len(PROMPTS))]


def model_updates_cache() -> bool:
    """Return True if the model, and not its attention function, updates the paged cache."""
    from transformers.integrations.flash_attention import flash_attention_forward

    return "cache" not in inspect.signature(flash_attention_forward).parameters


@pytest.fixture
def poisoned_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every unwritten page with NaN."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    made = PagedAttentionCache.__init__

    def poisoned(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        assert self.dtype == torch.float32
        self.cache_tensor.fill_(255)

    monkeypatch.setattr(PagedAttentionCache, "__init__", poisoned)


@pytest.fixture
def threads_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give threads the context of their parent.

    transformers runs the model in a thread, and trace() belongs to a context.
    """
    start = threading.Thread.start

    def inherit(thread: threading.Thread) -> None:
        monkeypatch.setattr(
            thread, "run", functools.partial(contextvars.copy_context().run, thread.run)
        )
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", inherit)


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "temperature": 0.8, "top_k": 20},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_tokens_equal_transformers(
    paged: ModuleType, request: pytest.FixtureRequest, name: str, how: str
) -> None:
    theirs = tokens(FAMILIES[name].build("paged|eager"), **HOW[how])
    model = FAMILIES[name].build("eager")
    if how == "greedy":
        for prompt, output in zip(PROMPTS, theirs):
            alone = model.generate(
                torch.tensor([prompt]), max_new_tokens=9, min_new_tokens=9, do_sample=False
            )
            assert alone[0, len(prompt) :].tolist() == output, "what transformers itself says alone"
    request.getfixturevalue("poisoned_pages")
    request.getfixturevalue("threads_inherit")
    with pt.integrations.transformers.continuous_batching(model), trace() as ran:
        ours = tokens(model, **HOW[how])
    assert ours == theirs
    assert model.config._attn_implementation == "eager"
    in_place, gathered = (("attention_fwd", "cpu") in ran, ("attention_varlen_fwd", "cpu") in ran)
    assert gathered
    # transformers 5.24 updates the cache in the model, which gathers the keys. 5.23 leaves that to
    # the attention, which reads pages in place unless they are the ring of a sliding window.
    assert in_place == (name != "mistral" and not model_updates_cache())
    assert {backend for _, backend in ran} == {"cpu"}


def test_page_table_follows_from_cache_positions(paged: ModuleType) -> None:
    """Three requests of 5, 1 and 8 keys in pages of 4 need 2, 1 and 2 pages."""
    lies = [*range(40, 44), 8, 12, *range(4, 8), *range(20, 24)]
    pages, lengths = paged.table_of(
        torch.tensor(lies), torch.tensor([0, 5, 6, 14], dtype=torch.int32), 4
    )
    assert lengths.tolist() == [5, 1, 8]
    assert [row[: -(-n // 4)] for row, n in zip(pages.tolist(), lengths.tolist())] == [
        [10, 2],
        [3],
        [1, 5],
    ]


def test_paged_implementation_needs_continuous_batching(paged: ModuleType) -> None:
    model, ids = FAMILIES["llama"].build("pytransformer"), torch.tensor([[5, 6, 7]])
    want = model(ids).logits
    with (
        pytest.raises(
            ValueError,
            match=(
                r"LlamaAttention was called without continuous batching's cache.*which is for"
                r" generate_batch"
            ),
        ),
        pt.integrations.transformers.continuous_batching(model),
    ):
        model(ids)
    assert model.config._attn_implementation == "pytransformer"
    assert torch.equal(model(ids).logits, want)
    with pytest.raises(ValueError, match="pytransformer is not supported for continuous batching"):
        tokens(model, do_sample=False)


def test_unsupported_arguments_are_refused(hugging_face: Any, paged: ModuleType) -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    cache, t = object.__new__(PagedAttentionCache), torch.zeros(1, 2, 3, 4)
    module = torch.nn.Module()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "got a mask in continuous batching"),
        ({"block_table": torch.zeros(1, 1)}, "got a block table"),
        ({"dropout": 0.1}, "or dropout, in continuous batching"),
        ({"visible": t}, "the keyword 'visible'"),
    ]
    for given, output in refused:
        with pytest.raises(ValueError, match=output):
            paged.paged_attention_forward(
                module, t, t, t, **{"attention_mask": None, "cache": cache, **given}
            )
    blip = hugging_face.BlipVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=8,
    )
    model = hugging_face.BlipVisionModel(blip)
    with (
        pytest.raises(ValueError, match="in code of its own"),
        pt.integrations.transformers.continuous_batching(model),
    ):
        pass
