# SPDX-License-Identifier: Apache-2.0
"""The built CUDA library has the resources of the committed table: see resources.py."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("resources.py")
EPILOGUES = {  # products -> their purpose
    "Linear": "matmul fwd", "Sums": "matmul fwd", "Hidden": "feed_forward fwd",
    "DHidden": "feed_forward bwd",
    "RowPartials": "cross_entropy fwd", "DLogits": "cross_entropy bwd",
}  # fmt: skip


@pytest.fixture(scope="module")
def resources() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_resources", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table(resources: ModuleType) -> dict[str, dict[str, int]]:
    if reason := resources.why_not():
        pytest.skip(reason)
    return resources.measure()


def test_no_kernel_uses_local_memory_and_rows_move_16_bytes_at_a_time(
    resources: ModuleType, table: dict
) -> None:
    assert resources.faults(table) == []


def test_no_wgmma_register_is_accessed_in_flight(resources: ModuleType, table: dict) -> None:
    """No sm_90a kernel accesses a register that setmaxnreg released either."""
    if not any("sm_90a sm90_" in key for key in table):
        pytest.skip("the library has no kernels for sm_90a")
    assert resources.hazards() == []


def test_attention_loops_keep_their_order_of_products(resources: ModuleType, table: dict) -> None:
    assert resources.misordered() == []


LOOP = """
 /*0000*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT ;
 /*0010*/ MUFU.EX2 R3, R3 ;
 /*0020*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], R24, gsb0 ;
 /*0030*/ HGMMA.64x64x16.F32.BF16 R88, R4, gdesc[UR24], R88, gsb0 ;
 /*0040*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
 /*0050*/ @P0 MUFU.EX2 R2, R2 ;
 /*0060*/ MUFU.EX2 R3, R3 ;
 /*0070*/ F2FP.BF16.F32.PACK_AB R2, R3, R2 ;
 /*0080*/ BAR.SYNC.DEFER_BLOCKING 0x4, 0x100 ;
 /*0090*/ HGMMA.64x64x16.F32.BF16.tnspA.tnspB R56, gdesc[UR20], RZ, !UPT, gsb0 ;
 /*00a0*/ STS.128 [R2], R4 ;
 /*00b0*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""


@pytest.mark.parametrize(
    ("old", "new", "schedule"),
    [
        ("", "", "64x128 EX2*1 64x64r WAIT1 EX2*2 F2FP*1 BAR 64x64t STS*1 WAIT0 END"),
        # an exponential that ptxas moves behind the wait
        (
            "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n /*0050*/ @P0 MUFU.EX2 R2, R2 ;",
            "MUFU.EX2 R2, R2 ;\n /*0050*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;",
            "64x128 EX2*1 64x64r EX2*1 WAIT1 EX2*1 F2FP*1 BAR 64x64t STS*1 WAIT0 END",
        ),
        # one group of two products
        ("R24, gsb0", "R24", "64x128 EX2*1 WAIT1 EX2*2 F2FP*1 BAR 64x64t STS*1 WAIT0 END"),
    ],
)
def test_schedule_gives_the_order_of_products_and_work(
    old: str, new: str, schedule: str, resources: ModuleType
) -> None:
    assert old in LOOP
    assert resources.sass.schedule(LOOP.replace(old, new, 1).splitlines()) == schedule


def test_other_orders_of_products_are_detected(
    resources: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous order of the fused backward ran exponentials after the wait for dS K."""
    symbol = "_ZN2pt4cuda31sm90_attention_bwd_fused_kernelINS_3ptx4bf16ENS0_5FusedILi128ELb1EEEEEvv"
    monkeypatch.setattr(resources, "dumped_code", lambda: {("sm_90a", symbol): []})
    before = (
        "64x64 BAR 64x64t WAIT1 EX2*5 WAIT0 EX2*27 F2FP*16 STS*8 64x64 64x128r WAIT1 F2FP*16"
        " 64x128r STSM*4 WAIT0 END"
    )
    for schedule, wrong in ((before, 1), (resources._FUSED_128, 0)):
        monkeypatch.setattr(resources.sass, "schedule", lambda _, schedule=schedule: schedule)
        assert len(resources.misordered()) == wrong


SASS = """
 /*0000*/ @P0 BRA 0x00c0 ; /* */
 /*0010*/ USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
 /*0020*/ LDS.128 R4, [R2] ;
 /*0030*/ HGMMA.64x64x16.F32.BF16 R56, R4, gdesc[UR20].tnspB, RZ, !UPT ;
 /*0040*/ HGMMA.64x64x16.F32.BF16 R56, gdesc[UR20], R56, gsb0 ;
 /*0050*/ HGMMA.64x32x16.F32.BF16 R24, gdesc[UR24], RZ, !UPT, gsb0 ;
 /*0060*/ FADD R3, R2, R2 ;
 /*0070*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
 /*0080*/ FADD R3, R56, R4 ;
 /*0090*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
 /*00a0*/ STG.E.128 desc[UR4][R2.64], R24 ;
 /*00b0*/ EXIT ;
 /*00c0*/ USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
 /*00d0*/ MOV R23, R1 ;
 /*00e0*/ EXIT ;
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        (
            "FADD R3, R2, R2",
            "FADD R3, R2, R87",
            "0x60 FADD R3, R2, R87: touches R87, which a wgmma in flight adds to",
        ),
        ("FADD R3, R2, R2", "MOV R56, R2", "touches R56"),
        ("FADD R3, R2, R2", "LDS.64 R6, [R2]", "overwrites R6, which a wgmma in flight reads"),
        ("FADD R3, R2, R2", "MOV R5, R2", "overwrites R5"),
        ("FADD R3, R2, R2", "@P1 BRA 0x00a0", "0xa0 STG.E.128 desc[UR4][R2.64], R24: touches R24"),
        ("FADD R3, R56, R4", "FADD R3, R24, R4", "touches R24"),  # the group is still in flight
        ("gsb0, 0x0 ;", "gsb0, 0x1 ;", "touches R24"),
        ("R24, gdesc[UR24]", "R80, gdesc[UR24]", "shares some of its registers"),
        ("R24, gdesc[UR24]", "R4, gdesc[UR24]", "shares some of its registers"),
        (
            "R56, gdesc[UR20], R56, gsb0",
            "R56, gdesc[UR20], R56",
            "touches R56",
        ),  # both are one group, which may stay in flight
        ("!UPT, gsb0 ;", "!UPT ;", "waits before the last group ends"),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "EXIT", "a wgmma is in flight"),
        ("MOV R23, R1", "MOV R24, R1", "uses R24 after 0xc0 USETMAXREG.DEALLOC"),
        ("FADD R3, R2, R2", "FADD R240, R2, R2", "uses R240 after 0x10 USETMAXREG.TRY_ALLOC"),
    ],
)
def test_planted_hazards_are_detected(
    old: str, new: str, fault: str | None, resources: ModuleType
) -> None:
    assert old in SASS
    found = resources.sass.faults(
        SASS.replace(old, new, 1).splitlines() if old else SASS.splitlines()
    )
    if fault is None:
        assert found == []
    else:
        assert any(fault in line for line in found), found


def test_table_is_current(resources: ModuleType, table: dict) -> None:
    """On failure run `python tests/cuda/resources.py --write` and review the changes."""
    kept = json.loads(resources.TABLE.read_text())
    built_with = (resources.native.build_info() or {})["cuda"]["nvcc"]
    if kept["nvcc"] != built_with:
        pytest.skip(
            f"the table was made with nvcc {kept['nvcc']}, and the library with {built_with}"
        )
    assert resources.compare(table, kept["kernels"]) == []


def test_table_has_no_faults(resources: ModuleType) -> None:
    """Architectures that are not built here are included."""
    assert resources.faults(json.loads(resources.TABLE.read_text())["kernels"]) == []


def test_few_instantiations(resources: ModuleType) -> None:
    """An op has at most 24 instantiations per direction and architecture, or its listed count.

    docs/design/cuda.md gives the reasons for higher counts, which may only fall.
    """
    kernels = json.loads(resources.TABLE.read_text())["kernels"]
    most = json.loads(SCRIPT.with_name("instantiations.json").read_text())
    counted = collections.Counter(
        f"{key.split()[0]} {_direction(key.split(' ', 1)[1])}" for key in kernels
    )
    assert {key: count for key, count in counted.items() if count > 24} == most
    assert not any(" sm90_" in key for key in kernels if not key.startswith("sm_90a "))


def _direction(kernel: str) -> str:
    """Return the op and the direction of a kernel name, portable and sm_90a alike."""
    if epilogue := re.search(r"sm90_matmul_kernel<.*Operands<[^>]*>, (\w+)", kernel):
        return EPILOGUES[epilogue[1]]
    found = re.search(
        r"(attention|layer_norm|cross_entropy|rotary|probe)_(?:(fwd|bwd))?",
        kernel.replace("convert_dq", "attention_bwd"),
    )
    assert found, kernel
    return f"{found[1]} {found[2] or ('bwd' if 'reduce' in kernel else 'fwd')}"


def test_additional_kernels_are_detected(
    resources: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = json.loads(resources.TABLE.read_text())
    for more in (
        "sm_90a sm90_attention_bwd_fused_kernel<bf16, Fused<256> >",
        *(f"sm_80 layer_norm_bwd_x{i}" for i in range(24)),
    ):
        kept["kernels"][more] = {}
    for name, wrong in (("resources.json", True), ("as_it_is.json", False)):
        table = tmp_path / name
        table.write_text(json.dumps(kept) if wrong else resources.TABLE.read_text())
        monkeypatch.setattr(resources, "TABLE", table)
        with pytest.raises(AssertionError) if wrong else contextlib.nullcontext():
            test_few_instantiations(resources)
        monkeypatch.undo()


def test_faults_are_detected(resources: ModuleType) -> None:
    used = {
        "registers": 64,
        "stack": 0,
        "shared": 0,
        "wide": 8,
        "narrow": 1,
        "products": 0,
        "warpgroup_products": 0,
    }
    assert resources.faults({"sm_90a layer_norm_fwd_kernel<float, float, Lanes>": used}) == []
    assert (
        "8 bytes of stack"
        in resources.faults(
            {"sm_90a layer_norm_fwd_kernel<float, float, Lanes>": used | {"stack": 8}}
        )[0]
    )
    assert (
        "0 accesses"
        in resources.faults(
            {"sm_90a layer_norm_bwd_kernel<float, float, Lanes>": used | {"wide": 0}}
        )[0]
    )
    for rotary in (
        "fwd_kernel<WholeRows<float> >",
        "append_kernel<WholeRows<bf16> >",
        "bwd_kernel<f16>",
    ):
        assert "0 accesses" in resources.faults({f"sm_90a rotary_{rotary}": used | {"wide": 0}})[0]
    assert resources.faults({"sm_90a rotary_append_kernel<AnyRows>": used | {"wide": 0}}) == []
    assert (
        "no matrix product"
        in resources.faults({"sm_80 attention_fwd_kernel<bf16, Kind<64, true>>": used})[0]
    )
    hopper = "sm_90a sm90_attention_fwd_kernel<bf16, Hopper<64, true, false> >"
    assert resources.faults({hopper: used | {"warpgroup_products": 20}}) == []
    for wrong in (
        {"warpgroup_products": 0},
        {"warpgroup_products": 20, "products": 8},
        {"warpgroup_products": 20, "wide": 0},
    ):
        assert "products of warpgroups" in resources.faults({hopper: used | wrong})[0]
    dense = hopper.replace("fwd", "bwd_dbias")
    assert resources.faults({dense: used | {"warpgroup_products": 8}}) == []
    assert (
        "products of warpgroups" in resources.faults({dense: used | {"warpgroup_products": 4}})[0]
    )
    product = "sm_90a sm90_matmul_kernel<bf16, Operands<false, false, false>, Linear>"
    assert resources.faults({product: used | {"warpgroup_products": 4, "wide": 16}}) == []
    for wrong in ({"warpgroup_products": 0, "wide": 16}, {"warpgroup_products": 4}):
        assert "products of warpgroups" in resources.faults({product: used | wrong})[0]
    no_matrix = product.replace("Linear>", "RowPartials<false, false> >")
    assert resources.faults({no_matrix: used | {"warpgroup_products": 4, "wide": 0}}) == []
    assert (
        resources.compare(
            {"sm_80 a": used}, {"sm_80 a": used | {"registers": 65}, "sm_90a a": used}
        )
        != []
    )
    assert resources.compare({"sm_80 a": used}, {"sm_80 a": used, "sm_90a a": used}) == []
