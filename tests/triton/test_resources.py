# SPDX-License-Identifier: Apache-2.0
"""The kernels compile ahead of time with the resources of the committed table: see resources.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import triton

from pytransformer.ops._backends.triton import attention as triton_attention

SCRIPT = Path(__file__).with_name("resources.py")
TABLE = SCRIPT.with_suffix(".json")


# In every run: one problem per kernel.
SOME = (
    r"^(full|t5_bias|dropout|everything|blocks|mask lists) D64 bf16|^(causal|bias|decode causal)"
    r" D128 bf16"
    r"|^feed_forward (relu|silu gated) 100 rows bf16"
    r"|^add_norm N(1024|20000) bf16|^cross_entropy 1000 classes bf16"
)
ARCHITECTURES = (80, 90, 100, 120)


def _check(architecture: int, only: str = "") -> None:
    # A separate process: the kernels are interpreted in this one.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--arch", str(architecture), "--only", only]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_sampled_kernels_match_the_table() -> None:
    _check(90, SOME)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_match_the_table(architecture: int) -> None:
    if architecture != 90 and triton.__version__ != json.loads(TABLE.read_text())["triton"]:
        pytest.skip(
            f"the table of sm_{architecture} is not of Triton {triton.__version__}: for that, sm_90"
            " alone is compiled"
        )
    _check(architecture)


def test_kernels_beyond_the_shared_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest kernel exceeds some GPUs; the backend's limit equals the table."""
    table = json.loads(TABLE.read_text())["kernels"]
    largest = max(
        used["shared"] for key, used in table.items() if key.endswith("D256 fp32 backward_dkdv")
    )
    query = types.SimpleNamespace(
        device=torch.device("cuda", 0), dtype=torch.float32, shape=(1, 1, 9, 256)
    )
    for has, fits in ((largest, True), (largest - 1, False)):
        properties = types.SimpleNamespace(shared_memory_per_block_optin=has)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device, found=properties: found
        )
        assert (triton_attention._why_not_shared(query, query) is None) == fits
    narrow = types.SimpleNamespace(**{**vars(query), "shape": (1, 1, 9, 128)})
    assert triton_attention._why_not_shared(narrow, narrow) is None
