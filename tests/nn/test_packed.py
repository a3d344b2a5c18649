# SPDX-License-Identifier: Apache-2.0
"""Packed weights: an inference call equals the unpacked module after any change of its weight."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import pytransformer as pt
from pytransformer.nn import linear as linear_module
from pytransformer.nn import packed
from pytransformer.ops._backends.cpu import linear as cpu
from pytransformer.ops._core import fast_path, native

pytestmark = pytest.mark.skipif(
    native.why_not("feed_forward_linear") is not None,
    reason=f"no native library: {native.why_not('feed_forward_linear')}",
)
DTYPES = [torch.float32, torch.bfloat16]
IN, OUT, ROWS = 48, 80, 24
Layer = nn.Module


@pytest.fixture(autouse=True)
def packed_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Select our kernels on any CPU, and start and end without packed weights."""
    monkeypatch.setattr(cpu, "faster", lambda: dict.fromkeys(cpu.DTYPES, cpu.EVERYWHERE))
    pt.nn.drop_packed_weights()
    yield
    pt.nn.drop_packed_weights()


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """Return the packed weight of each call that our kernel computes."""
    seen: list[torch.Tensor | None] = []
    fast_path.why_not()  # loads it
    for holder, name in ((fast_path.entries, "linear"), (cpu, "forward")):
        run = getattr(holder, name)

        def spy(*args: Any, run: Callable[..., Any] = run) -> Any:
            found = run(*args)
            if found is not NotImplemented:
                seen.append(args[3] if len(args) > 3 else None)
            return found

        monkeypatch.setattr(holder, name, spy)
    return seen


def linear_layer(dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(IN, OUT).to(dtype)
    pt.integrations.convert(layer)
    return layer


def conv1d_layer(dtype: torch.dtype) -> nn.Module:
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(OUT, IN).to(dtype)
    nn.init.normal_(layer.bias)
    pt.integrations.convert(layer)
    return layer


LAYERS = [linear_layer, conv1d_layer]


def unpacked(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a copy whose weights are not registered."""
    with torch.no_grad():
        return copy.deepcopy(layer)(x)


def warm(layer: Layer, dtype: torch.dtype) -> torch.Tensor:
    """Pack the layer's weights and return inputs of a call that uses them."""
    x = torch.randn(ROWS, IN).to(dtype)
    assert pt.nn.pack_weights(layer) == 1
    with torch.no_grad():
        assert torch.equal(layer(x), unpacked(layer, x))
    assert pt.nn.packed_bytes() > 0
    return x


# ---- changes of the weight


def scale_data(layer: Layer) -> None:
    layer.weight.data.mul_(1.5)


def assign_data(layer: Layer) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


def add_to_data(layer: Layer) -> None:
    layer.weight.data += 0.25


def write_numpy(layer: Layer) -> None:
    numbers = layer.weight.detach().view(
        torch.int32 if layer.weight.dtype == torch.float32 else torch.int16
    )
    numbers.numpy()[:] ^= 1


def write_a_row(layer: Layer) -> None:
    layer.weight.data[7] = 3.0


def write_a_block_of_columns(layer: Layer) -> None:
    layer.weight.data[:, :32] = 3.0


def change_one_number(weight: torch.Tensor) -> None:
    """Change an element outside the digest, so that another part of the key shows it."""
    raw = torch.ops.pytransformer_C.feed_forward_linear_digest
    digest, flat = raw(weight), weight.view(-1)
    for i in range(5 * weight.shape[1], 6 * weight.shape[1]):
        old = flat[i].item()
        flat[i] = old + 1.0
        if raw(weight) == digest:
            return
        flat[i] = old
    raise AssertionError("the digest covers every element")


def change_one_number_in_place(layer: Layer) -> None:
    with torch.no_grad():
        change_one_number(layer.weight)


def assign_data_with_one_change(layer: Layer) -> None:
    new = layer.weight.detach().clone()
    change_one_number(new)
    layer.weight.data = new


def copy_in_place(layer: Layer) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.randn_like(layer.weight))


def replace_parameter(layer: Layer) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def load(layer: Layer) -> None:
    layer.load_state_dict({k: v * 2 for k, v in layer.state_dict().items()})


def load_by_assignment(layer: Layer) -> None:
    layer.load_state_dict({k: v * 2 for k, v in layer.state_dict().items()}, assign=True)


def swap_storage(layer: Layer) -> None:
    with torch.no_grad():
        layer.weight.set_(torch.randn_like(layer.weight))


def step(optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[Layer], None]:
    def run(layer: Layer) -> None:
        x = torch.randn(ROWS, IN).to(layer.weight.dtype)
        layer(x).float().square().sum().backward()
        optimizer(layer.parameters()).step()

    return run


CHANGES = {
    "data.mul_": scale_data,
    "data =": assign_data,
    "data +=": add_to_data,
    "NumPy": write_numpy,
    "one row": write_a_row,
    "columns": write_a_block_of_columns,
    "one number": change_one_number_in_place,
    "data = with one change": assign_data_with_one_change,
    "copy_": copy_in_place,
    "new parameter": replace_parameter,
    "load_state_dict": load,
    "load_state_dict(assign=True)": load_by_assignment,
    "set_": swap_storage,
    "SGD": step(lambda p: torch.optim.SGD(p, lr=0.1)),
    "AdamW(fused=True)": step(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)),
    "AdamW(foreach=True)": step(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("build", LAYERS)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_give_new_results(
    build: Callable[[torch.dtype], Layer], change: str, dtype: torch.dtype
) -> None:
    layer = build(dtype)
    x = warm(layer, dtype)
    with torch.no_grad():
        before = layer(x)
        with torch.enable_grad():
            CHANGES[change](layer)
        assert torch.equal(after := layer(x), unpacked(layer, x))
        assert not torch.equal(after, before)


def test_a_new_dtype_gives_new_results() -> None:
    layer = linear_layer(torch.float32)
    warm(layer, torch.float32)
    layer.bfloat16()
    x = torch.randn(ROWS, IN, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(layer(x), unpacked(layer, x))


# ---- when packed weights are used


def test_inference_uses_the_packed_weight(used: list[torch.Tensor | None]) -> None:
    layer = linear_layer(torch.float32)
    x = warm(layer, torch.float32)
    used.clear()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            layer(x), layer(x.view(2, 12, IN))
            layer(x[: cpu.FEW_ROWS])
    panels = packed.weights[id(layer.weight)].held[1]
    assert [t if t is None else t.data_ptr() for t in used] == [panels.data_ptr()] * 2 + [None] + [
        panels.data_ptr()
    ] * 2 + [None]


def test_table_limits_the_rows(
    used: list[torch.Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "faster", lambda: {torch.float32: cpu.MaxRows(10, 0, packed=24)})
    layer = linear_layer(torch.float32)
    assert pt.nn.pack_weights(layer) == 1
    for rows, computed in ((9, 1), (24, 1), (25, 0)):
        used.clear()
        with torch.no_grad():
            layer(torch.randn(rows, IN))
        assert len(used) == computed and None not in used
    pt.nn.drop_packed_weights()
    with torch.no_grad():
        layer(torch.randn(24, IN))
    assert not used


def test_few_rows_ignore_packed_weights_as_the_table_states(
    used: list[torch.Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = cpu.MaxRows(30, 0, packed=24, unpacked=12)
    monkeypatch.setattr(cpu, "faster", lambda: {torch.float32: limits})
    layer = linear_layer(torch.float32)
    warm(layer, torch.float32)
    for rows, packs in ((1, False), (12, False), (13, True), (24, True), (25, False)):
        used.clear()
        with torch.no_grad():
            layer(torch.randn(rows, IN))
        assert [panels is not None for panels in used] == [packs], rows


def test_gradients_and_observers_do_not_use_it(
    used: list[torch.Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "TRAINING_WORK", 0)
    layer = linear_layer(torch.float32)
    x = warm(layer, torch.float32)
    used.clear()
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(OUT, IN))
    with torch.no_grad():
        torch.func.vmap(layer)(x)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(layer, backend="eager")(x), unpacked(layer, x))
        exported = torch.export.export(layer, (x,)).module()
        torch.fx.symbolic_trace(nn.Sequential(layer))
    assert used and all(panels is None for panels in used)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "aten.linear.default" in targets


def hook(layer: nn.Linear) -> None:
    layer.register_forward_hook(lambda m, args, output: output * 2)


def instance_forward(layer: nn.Linear) -> None:
    own = layer.forward
    layer.forward = lambda x: own(x) * 2  # type: ignore[method-assign]


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def parametrization(layer: nn.Linear) -> None:
    parametrize.register_parametrization(layer, "weight", Halved())


class LowRank(nn.Module):
    """A layer with an adapter, as LoRA wraps it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(IN, 2), nn.Linear(2, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", [hook, instance_forward, parametrization, LowRank])
def test_changed_modules_give_the_results_of_unconverted_ones(
    change: Callable[[nn.Linear], Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(IN, OUT).to(dtype)
    layer = copy.deepcopy(plain)
    pt.integrations.convert(layer)
    x = warm(layer, dtype)
    results = []
    for one in (plain, layer):
        torch.manual_seed(1)
        model = change(one) or one
        with torch.no_grad():
            results.append(model.to(dtype)(x).float())
    limit = 8 * torch.finfo(dtype).eps
    assert (results[0] - results[1]).norm() <= limit * results[0].norm()


# ---- memory and threads


def test_memory_of_dead_weights_is_freed() -> None:
    layer = linear_layer(torch.float32)
    warm(layer, torch.float32)
    held = pt.nn.packed_bytes()
    assert OUT * IN * 4 <= held <= 2 * OUT * IN * 4  # padded to full panels
    del layer
    gc.collect()
    assert pt.nn.packed_bytes() == 0 and not packed.weights


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    first = linear_layer(torch.float32)
    x = warm(first, torch.float32)
    held = pt.nn.packed_bytes()
    monkeypatch.setenv("PYTRANSFORMER_PACKED_BYTES", str(2 * held - 1))
    second = linear_layer(torch.float32)
    pt.nn.pack_weights(second)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(second(x), unpacked(second, x))
            assert pt.nn.packed_bytes() == held
    pt.nn.drop_packed_weights(first)
    assert pt.nn.packed_bytes() == 0
    pt.nn.pack_weights(second)
    with torch.no_grad():
        second(x)
    assert pt.nn.packed_bytes() == held


def test_only_registered_weights_are_packed() -> None:
    layer = linear_layer(torch.float32)
    with torch.no_grad():
        layer(torch.randn(ROWS, IN))
    assert pt.nn.packed_bytes() == 0
    with torch.inference_mode():
        inference = nn.Linear(IN, OUT)
    assert pt.nn.pack_weights(inference) == 0  # it has no version counter


def test_threads_share_one_copy() -> None:
    layer = linear_layer(torch.float32)
    x = torch.randn(ROWS, IN)
    expected = unpacked(layer, x)
    pt.nn.pack_weights(layer)
    start, wrong = threading.Barrier(4), []

    def call() -> None:
        start.wait()
        with torch.no_grad():
            for _ in range(50):
                if not torch.equal(layer(x), expected):
                    wrong.append("result")

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (entry,) = packed.weights.values()
    assert not wrong and pt.nn.packed_bytes() == entry.held[1].numel()
