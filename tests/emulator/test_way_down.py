# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels that do not start fall back to the next backend; later failures raise.

The kernels are emulated.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._core import fast_path
from support.way_down import FAULTS, REFUSED, WAYS, attention, check, failing, preferred

pytestmark = [pytest.mark.falls_back, pytest.mark.usefixtures("emulated")]
CSRC = Path(__file__).resolve().parents[2] / "csrc" / "cuda"
# The prefix of csrc/cuda before the runtime's message.
STARTS = {"a kernel could not be launched: ": "launch.cuh", "CUDA: ": "device.cu"}
DRIVER, MAPS = "the driver has no ", "cuTensorMapEncodeTiled failed: "
BEFORE = [
    *(start + text for start in STARTS for text in REFUSED),
    DRIVER + "cuCtxSetCurrent: it is older than CUDA 4",
    MAPS + "801",
]


def test_messages_have_the_prefix_of_the_library() -> None:
    for start, file in STARTS.items():
        assert f'"{start}"' in (CSRC / file).read_text()
    assert (
        f'"{MAPS}"' in (CSRC / "tensor_map.cuh").read_text()
        and f'"{DRIVER}"' in (CSRC / "driver.h").read_text()
    )


# Run a full model once: it duplicates attention and takes 14 s of the emulator.
@pytest.mark.parametrize(
    "error, way",
    [*((e, w) for e in BEFORE for w in WAYS if w != "hugging_face"), (BEFORE[0], "hugging_face")],
)
def test_failures_fall_back_to_the_next_backend(
    monkeypatch: pytest.MonkeyPatch, error: str, way: str
) -> None:
    want = WAYS[way]()
    for then in ("cpu", "reference"):
        with preferred("cuda", then=then):
            monkeypatch.setattr(cuda_library, "call", failing(lambda: RuntimeError(error)))
            check(way, want, "cuda", error)


def test_failing_backward_falls_back() -> None:
    want = attention()
    error = RuntimeError("a kernel could not be launched: too many resources requested for launch")
    with preferred("cuda", only_backward=error):
        check("attention", want, "cuda", "too many resources", fails="attention_bwd")


@pytest.mark.parametrize(
    "text",
    [*(start + text for start in STARTS for text in FAULTS), "attention: head sizes up to 256"],
)
def test_failures_of_running_kernels_are_raised_unchanged(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    error = RuntimeError(text)
    monkeypatch.setattr(cuda_library, "call", failing(lambda: error))
    with preferred("cuda"), pytest.raises(RuntimeError) as caught:
        attention()
    assert caught.value is error and not pt.fallbacks()


def test_missing_kernel_images_fall_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms and networks fall back like attention."""
    monkeypatch.setattr(
        cuda_library,
        "call",
        failing(lambda: RuntimeError("a kernel could not be launched: invalid device function")),
    )
    from pytransformer.ops._core.registry import HOME

    monkeypatch.setitem(HOME, "cuda", "cpu")
    x, weight = torch.randn(4, 8), torch.randn(8)
    want = torch.nn.functional.layer_norm(x, (8,), weight)
    warned = pytest.warns(
        RuntimeWarning, match="layer_norm.*runs on the backend cpu: cuda: did not run: RuntimeError"
    )
    with fast_path.off(), warned:  # the fast path skips the device check of backends
        for _ in range(2):
            torch.testing.assert_close(pt.layer_norm(x, 8, weight), want)
    (record,) = pt.fallbacks()
    assert record.count == 2 and record.op == "layer_norm"
