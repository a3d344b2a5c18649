"""Faults planted in the attention kernels for sm_90a, each of which must be caught by sm90.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from planted import Fault, check_caught, check_texts, parameters

RING, FWD = "tile/ring.cuh", "attention/sm90_fwd.cuh"
QUERIES, KEYS = "attention/sm90_bwd_queries.cuh", "attention/sm90_bwd_keys.cuh"
WAIT = "          ptx::wgmma_wait<0>();\n"
RELEASE = "          release_products(v, visit);\n"
LATE, TOUCHED = "not ordered after", "was touched while a wgmma was in flight"

FAULTS = (
    Fault("phase of empty flipped", RING, "await(empty(n), parity(n) ^ 1);", "await(empty(n), parity(n));", "deadlock", slow=False),
    Fault("keys not awaited", FWD, "          k.await_full(visit + 1);\n", "", "has not waited for"),
    Fault("values not awaited", FWD, "          v.await_full(visit);\n", ""),
    Fault("scores not awaited", FWD, "          ptx::wgmma_wait<1>();\n", "", TOUCHED),
    Fault("scores not awaited, backward", KEYS, "        ptx::wgmma_wait<1>();\n", "", TOUCHED),
    Fault("values released too early", FWD, WAIT + RELEASE, RELEASE + WAIT, LATE),
    Fault("keys released too early", QUERIES, "          ptx::wgmma_wait<1>();\n          release_products(k, visit - 1);",
          "          release_products(k, visit - 1);\n          ptx::wgmma_wait<1>();", LATE),
    Fault("queries released at every visit", FWD, "if (t == w.range.first) release", "release", LATE),
    Fault("no decay of the outputs", FWD, "o[i] *= rows.decay[i / 2 % 2];", "o[i] *= 1.0f;"),
)  # fmt: skip


def test_a_fault_changes_what_it_says() -> None:
    check_texts(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, builder: ModuleType, tmp_path: Path) -> None:
    check_caught(fault, "sm90.py", "attention", builder, tmp_path, only="sm90_*.cu")
