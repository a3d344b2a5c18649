# SPDX-License-Identifier: Apache-2.0
"""Resources of each kernel of libpytransformer_cuda.so: registers, memory, instructions.

    python tests/cuda/resources.py              compare the built library with resources.json
    python tests/cuda/resources.py --write      write the table for the built architectures

No GPU is needed. cuobjdump and nvdisasm of CUDA or of Triton's wheel read the binary.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._core import native

sys.path.append(str(Path(__file__).parent))
import sass  # in this folder; bench/tools/inspect_kernels.py loads this file by its path

TABLE = Path(__file__).with_name("resources.json")
LIBRARY = native.PACKAGE / cuda_library.LIBRARY_NAME
COUNTED = {
    "wide": r"\b(?:LDG|STG|LDGSTS)\.E(?:\.\w+)*\.128\b",  # 16-byte accesses
    "narrow": r"\b(?:LDG|STG)\.E(?!(?:\.\w+)*\.128\b)",
    "products": r"\bHMMA\b",  # warp instructions
    "warpgroup_products": r"\bHGMMA\b",
}


def tools() -> Path | None:
    """Return the folder of cuobjdump and nvdisasm, or None."""
    spec = importlib.util.find_spec("triton")
    folders = [Path(path).parent for path in (shutil.which("nvdisasm"),) if path]
    if spec and spec.submodule_search_locations:
        folders.append(
            Path(next(iter(spec.submodule_search_locations))) / "backends" / "nvidia" / "bin"
        )
    return next(
        (f for f in folders if (f / "cuobjdump").exists() and (f / "nvdisasm").exists()), None
    )


def why_not() -> str | None:
    """Return None if the library can be examined here, else the reason."""
    if not LIBRARY.exists():
        return cuda_library.why_not_loaded("layer_norm_fwd")
    return None if tools() else "cuobjdump and nvdisasm were not found: install CUDA's or triton"


def _dump(*options: str) -> Iterator[str]:
    """Yield the lines that cuobjdump prints of the library."""
    folder = tools()
    assert folder
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = [str(folder / "cuobjdump"), *options, str(LIBRARY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def readable(symbols: list[str]) -> dict[str, str]:
    """Return mangled -> kernel name and template arguments, without namespaces and parameters."""
    output = subprocess.run(
        ["c++filt", *symbols], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    output = [
        re.sub(r"\(pt::(?:\w+::)*(\w+)\)(\d+)", r"\1 \2", name) for name in output
    ]  # an enumerator as argument
    short = [
        re.sub(r"\bpt::(?:\w+::)*", "", re.sub(r"\(pt::.*\)$", "", name)).removeprefix("void ")
        for name in output
    ]
    return dict(zip(symbols, short))


@functools.cache
def dumped_code() -> dict[tuple[str, str], list[str]]:
    """Return the SASS instructions of each kernel, by architecture and symbol.

    They are parsed while cuobjdump runs, and the encodings, two thirds of its 420 MB for sm_90a,
    are dropped.
    """
    code: dict[tuple[str, str], list[str]] = {}
    current: list[str] = []
    arch = ""
    for line in _dump("--dump-sass"):
        instruction, end, _ = line.partition(";")
        if end:
            current.append(instruction + end)
        elif m := re.match(r"\s*arch = (\w+)", line):
            arch = m[1]
        elif m := re.match(r"\s*Function : (\S+)", line):
            current = code.setdefault((arch, m[1]), [])
    return code


def hazards() -> list[str]:
    """Return accesses to registers of a wgmma in flight, or released by setmaxnreg: sass.py."""
    code = {symbol: lines for (arch, symbol), lines in dumped_code().items() if arch == "sm_90a"}
    names = readable(sorted(code))
    return [
        f"sm_90a {names[symbol]}: {fault}"
        for symbol, lines in code.items()
        for fault in sass.faults(lines)
    ]


# The loops of sm_90a attention in SASS (sass.schedule), each with its number of copies.
_FUSED_64 = (
    "64x128 BAR 64x64t WAIT1 EX2*64 F2FP*32 64x128 WAIT1 STS*8 64x64r WAIT1 F2FP*32 64x64r STSM*8"
    " WAIT0"
)
_FUSED_128 = (
    "64x64 WAIT0 STS*8 64x64 EX2*32 F2FP*16 64x128r WAIT1 F2FP*16 64x128r STSM*4 BAR 64x64t WAIT1"
)
LOOPS = {
    # S of the next tile, P V, and at least 32 exponentials before the wait for P V
    r"sm90_attention_fwd_kernel<": (r"64x\d+ 64x\d+r WAIT1 EX2\*(?:3[2-9]|[4-9]\d|1\d\d) ", 1),
    # S, dS K of the previous tile, dP, P dO, dS Q; tiles with and without bounds
    r"sm90_attention_bwd_fused_kernel<\w+, Fused(?:Bits)?<64": (re.escape(_FUSED_64), 2),
    # S, dP, P dO, dS Q, dS K
    r"sm90_attention_bwd_fused_kernel<\w+, Fused(?:Bits)?<128": (re.escape(_FUSED_128), 1),
}


def misordered() -> list[str]:
    """Return sm_90a attention kernels whose loop lacks its order of products and work.

    ptxas may move arithmetic behind a wait.
    """
    code = {s: lines for (arch, s), lines in dumped_code().items() if arch == "sm_90a"}
    names = readable(sorted(code))
    wrong = []
    for symbol, lines in code.items():
        for kernel, (loop, copies) in LOOPS.items():
            if not re.match(kernel, names[symbol]):
                continue
            schedule = sass.schedule(lines)
            if len(re.findall(loop, schedule)) != copies:
                wrong.append(f"{names[symbol]}: {schedule}")
    return wrong


def measure() -> dict[str, dict[str, int]]:
    """Return the resources by "sm_… kernel"."""
    table: dict[tuple[str, str], dict[str, int]] = {}
    arch = ""
    lines = _dump("--dump-resource-usage")
    for line in lines:
        if m := re.match(r"arch = (\w+)", line):
            arch = m[1]
        elif m := re.match(r"\s*Function ([\w$.]+):", line):
            used = dict(re.findall(r"(\w+):(\d+)", next(lines)))
            table[arch, m[1]] = {
                "registers": int(used["REG"]),
                "stack": int(used["STACK"]),
                "shared": int(used["SHARED"]),
            }
    code = dumped_code()
    for key, used in table.items():
        text = "\n".join(code[key])
        used |= {name: len(re.findall(pattern, text)) for name, pattern in COUNTED.items()}
    names = readable(sorted({symbol for _, symbol in table}))
    return {
        f"{arch} {names[symbol]}": used
        for (arch, symbol), used in sorted(
            table.items(), key=lambda kv: (kv[0][0], names[kv[0][1]])
        )
    }


def faults(table: dict[str, dict[str, int]]) -> list[str]:
    """Return the faults of kernels: local memory, narrow accesses, no tensor cores.

    Kernels of typed rows must access 16 bytes at a time. 16-bit attention must copy each operand so
    (in loops: one instruction per site) and use tensor cores.
    """
    found = [
        f"{key}: {used['stack']} bytes of stack" for key, used in table.items() if used["stack"]
    ]
    for key, used in table.items():
        attention = re.search(
            r"\battention_(fwd|fwd_split|bwd_dq|bwd_dkdv|bwd_dbias)_kernel<b?f16", key
        )
        rows = re.search(
            r"norm_(fwd|bwd)_kernel|rotary_(fwd|append)_kernel<WholeRows|rotary_bwd_kernel", key
        )
        if (attention or rows) and used["wide"] < 4:
            found.append(f"{key}: {used['wide']} accesses of 16 bytes")
        if attention and not used["products"]:
            found.append(f"{key}: no matrix product")
        writes = not re.search(r", RowPartials<\w+, false>", key)  # an epilogue with a matrix
        few = 16 if writes else 0
        if re.search(r"sm90_matmul_", key) and (
            used["warpgroup_products"] < 4 or used["products"] or used["wide"] < few
        ):
            found.append(
                f"{key}: {used['warpgroup_products']} products of warpgroups, {used['wide']} wide"
                " accesses"
            )
        # The gradient of a mask or bias has two products and is written in the lanes' layout, two
        # elements at a time.
        least, wide = (8, 0) if "sm90_attention_bwd_dbias_" in key else (20, 4)
        if re.search(r"sm90_attention_", key) and (
            used["warpgroup_products"] < least or used["products"] or used["wide"] < wide
        ):
            found.append(
                f"{key}: {used['warpgroup_products']} products of warpgroups, {used['products']} of"
                f" warps, {used['wide']} wide"
            )
    return found


def compare(table: dict[str, dict[str, int]], kept: dict[str, dict[str, int]]) -> list[str]:
    """Return the lines that differ, for the architectures of `table`."""
    archs = {key.split()[0] for key in table}
    expected = {key: used for key, used in kept.items() if key.split()[0] in archs}
    keys = sorted(table.keys() | expected.keys())
    return [
        f"{key}: {table.get(key)}, the table has {expected.get(key)}"
        for key in keys
        if table.get(key) != expected.get(key)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table, not compare with it")
    write = parser.parse_args().write
    if reason := why_not():
        print(reason)
        return 1
    nvcc = (native.build_info() or {})["cuda"]["nvcc"]
    table, kept = (
        measure(),
        json.loads(TABLE.read_text()) if TABLE.exists() else {"nvcc": None, "kernels": {}},
    )
    wrong = faults(table) + hazards()
    if write:
        archs = {key.split()[0] for key in table}  # the other architectures stay unchanged
        table |= {key: used for key, used in kept["kernels"].items() if key.split()[0] not in archs}
        lines = ",\n".join(
            f"    {json.dumps(key)}: {json.dumps(used)}" for key, used in sorted(table.items())
        )
        TABLE.write_text(f'{{\n  "nvcc": "{nvcc}",\n  "kernels": {{\n{lines}\n  }}\n}}\n')
    elif kept["nvcc"] == nvcc:  # another compiler allocates other registers
        wrong += compare(table, kept["kernels"])
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
