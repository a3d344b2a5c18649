# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels without a GPU through their launchers, and report their resources.

    python tests/triton/resources.py                                  compare with resources.json,
                                                                      sm_90 only
    python tests/triton/resources.py --arch 80 90 100 120 --write     write resources.json

A stub driver names the architecture, and CPU tensors imitate a GPU's. Arguments are specialized
as in a real launch; only the launch is missing. The tools in Triton's wheel read registers, stack,
shared memory and instructions from the binary.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from pytransformer import BlockMask
from pytransformer.kernels import _lang
from pytransformer.kernels.attention import configs as attention_tiles
from pytransformer.kernels.feed_forward import configs as network_tiles
from pytransformer.kernels.feed_forward import tiles as network
from pytransformer.kernels.layer_norm import configs as norm_tiles
from pytransformer.ops.append_kv import KeyValues, append_kv_op
from pytransformer.ops.attention import attention_op
from pytransformer.ops.cross_entropy import linear_cross_entropy_op
from pytransformer.ops.feed_forward import feed_forward_op
from pytransformer.ops.layer_norm import add_norm_op
from pytransformer.ops.rotary import rotary_op
from pytransformer.reference.eight_bit import quantize_kv
from pytransformer.testing.cases import case

TABLE = Path(__file__).with_name("resources.json")
ARCHITECTURES = (80, 90, 100, 120)
SHARED_LIMIT = {80: 166912, 90: 232448, 100: 232448, 120: 101376}  # max bytes per block
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
WGMMA = re.compile(
    r"sm_90 (full|causal|window|global keys) D(64|128) bf16"
    r" (forward|backward_dkdv|backward_dq)$|sm_90 feed_forward .* 100 rows bf16"
)
# Allowed spills: the tile is the smallest one, or every other measured tile spilled too.
SPILLING = re.compile(
    r"(bias dropout|everything) D256 bf16 backward_dkdv$|sm_80 (global keys t5_bias|segments) D64"
    r" bf16 backward_dq"
    r"|sm_(80|120) bias dropout D256 bf16 backward_dq|sm_(80|90) bias dropout D256 bf16"
    r" backward_dbias"
    r"|sm_90 (window|global keys) D64 bf16 backward_dkdv|sm_100 global keys (D64 bf16|D128 fp32)"
    r" backward_dq"
    r"|sm_(100|120) bias D256 bf16 backward_dkdv|sm_120 global keys bias D64 bf16 backward_dkdv"
    r"|sm_120 (blocks|segments) D256 bf16 backward_dkdv|sm_120 blocks D64 fp32 forward"
    r"|sm_120 decode (int8|e4m3) pages D128 bf16 forward|sm_120 decode int8 D128 fp16 forward"
)
REFUSED = re.compile(
    r".* D256 fp32$"
)  # on sm_120: see WIDE_SHARED in ops/_backends/triton/attention.py
WIDE = 20000  # columns of rows processed in blocks
DROPOUT = {"dropout_p": 0.1, "dropout_seed": 3}
SHORT = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "int8",
    torch.float8_e4m3fn: "e4m3",
}
ROTARY = [
    *(
        (name, dims, torch.bfloat16)
        for name in ("rotary", "rotary_norm", "append_kv_norm_pages")
        for dims in (64, 128, 256)
    ),
    *(
        (name, 128, torch.bfloat16)
        for name in ("rotary_interleaved", "rotary_partial", "append_kv")
    ),
    *((name, 128, torch.float32) for name in ("rotary", "rotary_norm", "append_kv_norm_pages")),
    *(
        ("append_kv_norm_pages", 128, t, eight)
        for t in (torch.bfloat16, torch.float32)
        for eight in (*SHORT,)[2:]
    ),
]


class Driver:
    """A stub of a Triton driver, enough to compile: it names the target."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def problems() -> Iterator[tuple[str, Callable[[], Any], str]]:
    """Yield (name, function for forward and backward, pattern of the relevant kernels)."""
    for found in _problems():
        yield (*found, "")[:3]


OPTIONS: dict[str, Any] = dict(
    softcap=30.0, z_loss_weight=1e-4, label_smoothing=0.1, return_accuracy=True
)


def _problems() -> Iterator[tuple[Any, ...]]:
    for name in ("full", "causal", "window", "bias", "t5_bias", "dropout", "everything"):
        yield f"{name} D64 bf16", attention(name, torch.bfloat16, 64)
    for name in ("full", "causal", "everything"):
        yield f"{name} D128 bf16", attention(name, torch.bfloat16, 128)
    for head_dim in (64, 128, 256):
        yield f"grouped queries D{head_dim} bf16", attention("gqa", torch.bfloat16, head_dim)
        yield f"grouped queries D{head_dim} fp32", attention("gqa", torch.float32, head_dim), "dkdv"
    yield "full D256 bf16", attention("full", torch.bfloat16, 256)
    for head_dim in (128, 256):
        yield f"bias D{head_dim} bf16", attention("bias", torch.bfloat16, head_dim), "dkdv"
        yield (
            f"bias dropout D{head_dim} bf16",
            attention("bias", torch.bfloat16, head_dim, **DROPOUT),
        )
    yield "everything D256 bf16", attention("everything", torch.bfloat16, 256), "dkdv|dq"
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    keys = mask[:, :, :1]
    for head_dim in (64, 128):
        yield (
            f"key mask D{head_dim} bf16",
            attention("full", torch.bfloat16, head_dim, attn_mask=keys),
            "forward|dkdv",
        )
    for head_dim in (64, 128, 256):
        yield (
            f"three score_mods D{head_dim} bf16",
            attention("t5_bias", torch.bfloat16, head_dim, attn_mask=mask, softcap=20.0),
            "dkdv",
        )
        segments = dict.fromkeys(
            ("query_segments", "key_segments"), mask.new_zeros(1, 64, dtype=torch.int64)
        )
        yield f"segments D{head_dim} bf16", attention("full", torch.bfloat16, head_dim, **segments)
        yield (
            f"segments D{head_dim} fp32",
            attention("full", torch.float32, head_dim, **segments),
            "forward",
        )
    blocks = BlockMask.sliding_window(64, (9, 9), block_size=64)
    for head_dim in (64, 128, 256):
        yield (
            f"blocks D{head_dim} bf16",
            attention("full", torch.bfloat16, head_dim, attn_mask=blocks),
        )
        yield (
            f"blocks D{head_dim} fp32",
            attention("full", torch.float32, head_dim, attn_mask=blocks),
            "forward|dkdv",
        )
    for block_size in (32, 128):
        smaller = BlockMask.sliding_window(64, (9, 9), block_size=block_size)
        yield (
            f"blocks of {block_size} D128 bf16",
            attention("causal", torch.bfloat16, 128, attn_mask=smaller),
        )
    yield (
        "blocks t5_bias dropout D64 bf16",
        attention("t5_bias", torch.bfloat16, 64, attn_mask=blocks, **DROPOUT),
    )
    first = {"window": (9, 9), "global_keys": 4}
    for head_dim in (64, 128, 256):
        yield f"global keys D{head_dim} bf16", attention("full", torch.bfloat16, head_dim, **first)
    yield "global keys D128 fp32", attention("full", torch.float32, 128, **first)
    for name in ("bias", "t5_bias"):
        yield (
            f"global keys {name} D64 bf16",
            attention(name, torch.bfloat16, 64, **first),
            "dq|dkdv|dbias",
        )
    yield (
        "global keys blocks D64 bf16",
        attention("full", torch.bfloat16, 64, attn_mask=blocks, **first),
    )
    yield (
        "decode global keys D128 bf16",
        attention("causal", torch.bfloat16, 128, Lq=1, Lk=8192, window=(4000, 0), global_keys=4),
    )
    for head_dim in (64, 128):
        yield f"pages D{head_dim} bf16", attention("pages", torch.bfloat16, head_dim)
        yield (
            f"decode pages D{head_dim} bf16",
            attention("decode_pages", torch.bfloat16, head_dim, Lq=1, Lk=8192),
        )
    yield "decode pages D128 fp32", attention("decode_pages", torch.float32, 128, Lq=1, Lk=8192)
    for name, eight in (("int8", torch.int8), ("e4m3", torch.float8_e4m3fn)):
        for head_dim in (64, 128, 256):
            yield (
                f"decode {name} D{head_dim} bf16",
                eight_bits("causal", torch.bfloat16, head_dim, eight, Lk=8192),
            )
        yield (
            f"decode {name} pages D128 bf16",
            eight_bits("decode_pages", torch.bfloat16, 128, eight, Lk=8192),
        )
        yield f"decode {name} D128 fp16", eight_bits("causal", torch.float16, 128, eight, Lk=8192)
        yield f"{name} D128 bf16", eight_bits("causal", torch.bfloat16, 128, eight, 64, 64)
        yield f"decode {name} D128 fp32", eight_bits("causal", torch.float32, 128, eight, Lk=8192)
    large = torch.ones(1024, 1024, dtype=torch.bool)
    yield (
        "mask lists D64 bf16",
        attention("full", torch.bfloat16, 64, B=8, Lq=1024, Lk=1024, attn_mask=large),
    )
    for name, head_dim in (("causal", 64), ("causal", 128), ("causal", 256), ("everything", 64)):
        yield (
            f"decode {name} D{head_dim} bf16",
            attention(name, torch.bfloat16, head_dim, Lq=1, Lk=8192),
        )
    for head_dim in (64, 128, 256):
        yield (
            f"decode causal D{head_dim} fp32",
            attention("causal", torch.float32, head_dim, Lq=1, Lk=8192),
        )
        yield f"full D{head_dim} fp32", attention("full", torch.float32, head_dim)
        yield (
            f"bias dropout D{head_dim} fp32",
            attention("bias", torch.float32, head_dim, **DROPOUT),
            "dkdv|dbias",
        )
    for rows in (100, 40, 3):
        yield (
            f"feed_forward relu {rows} rows bf16",
            feed_forward(rows, torch.bfloat16, activation="relu"),
        )
    yield (
        "feed_forward gelu dropout bf16",
        feed_forward(100, torch.bfloat16, activation="gelu", dropout_p=0.1, dropout_seed=3),
    )
    for rows in (100, 40, 3):
        yield (
            f"feed_forward silu gated {rows} rows bf16",
            feed_forward(rows, torch.bfloat16, gated=True, activation="silu"),
        )
        yield (
            f"feed_forward gelu {rows} rows fp32",
            feed_forward(rows, torch.float32, activation="gelu"),
        )
        yield (
            f"feed_forward silu gated {rows} rows fp32",
            feed_forward(rows, torch.float32, gated=True, activation="silu"),
        )
    for columns in (*norm_tiles.FORWARD, WIDE):
        yield f"add_norm N{columns} bf16", norm("layer", torch.bfloat16, columns, **DROPOUT)
    yield "add_norm N4096 fp32", norm("layer", torch.float32, 4096, **DROPOUT)
    yield "add_rms_norm N4096 bf16", norm("rms", torch.bfloat16, 4096)
    for name, dims, dtype, *eight in ROTARY:
        yield (
            f"{' '.join([name, *map(SHORT.get, eight)])} D{dims} {SHORT[dtype]}",
            rotary(name, dtype, dims, *eight),
        )
    for classes in (200, 1000, 50257):
        yield (
            f"cross_entropy {classes} classes bf16",
            cross_entropy(torch.bfloat16, classes, label_smoothing=0.1),
        )
    yield "cross_entropy 1000 classes fp32", cross_entropy(torch.float32, 1000)
    for classes in (200, 50257):
        run = cross_entropy(torch.bfloat16, classes, class_weight=torch.ones(classes), **OPTIONS)
        yield f"cross_entropy {classes} classes bf16 options", run


def attention(
    name: str,
    dtype: torch.dtype,
    head_dim: int,
    B: int = 1,
    Lq: int = 64,
    Lk: int = 64,
    **more: Any,
) -> Callable[[], Any]:
    """Return a shared case with more arguments."""

    def run() -> None:
        found = case(name).resize(B=B, Lq=Lq, Lk=Lk, D=head_dim)
        args, kwargs = found.make("cpu", dtype, seed=0, requires_grad=True)
        a, _, _ = attention_op.prepare(*args, **kwargs, **more)
        backend = attention_op.backends["triton"]
        out, lse = backend.forward(a)
        if Lq == 1 or found.forward_only:  # backward is independent of the feature
            return
        expected = [
            isinstance(a[i], torch.Tensor) and a[i].is_floating_point()
            for i in attention_op.positions
        ]
        backend.backward(a, (out, None), (out, lse), expected)

    return run


def eight_bits(
    name: str, dtype: torch.dtype, head_dim: int, eight: torch.dtype, Lk: int, Lq: int = 1
) -> Callable[[], Any]:
    """Return a shared case with 8-bit keys and values."""

    def run() -> None:
        args, kwargs = case(name).resize(B=1, Lq=Lq, Lk=Lk, D=head_dim).make("cpu", dtype, seed=0)
        found = {"query": args[0], "key": args[1], "value": args[2], **kwargs}
        for of in ("key", "value"):
            found[of], found[f"{of}_scale"] = quantize_kv(found[of], eight)
        attention_op.backends["triton"].forward(attention_op.prepare(**found)[0])

    return run


def feed_forward(
    rows: int, dtype: torch.dtype, gated: bool = False, **kwargs: Any
) -> Callable[[], Any]:
    def run() -> None:
        x, w1, w2, vector = (
            torch.zeros(size, dtype=dtype) for size in ((rows, 128), (256, 128), (128, 256), (256,))
        )
        gate = {"gate_weight": w1, "gate_bias": vector} if gated else {}
        a, _, _ = feed_forward_op.prepare(x, w1, vector, w2, None, **gate, **kwargs)
        backend = feed_forward_op.backends["triton"]
        out, *saved = backend.forward(a._replace(save=True))
        backend.backward(
            a._replace(save=True), (out,), saved, [True, True, True, True, False, gated, gated]
        )

    return run


def norm(kind: str, dtype: torch.dtype, columns: int, **dropout: Any) -> Callable[[], Any]:
    def run() -> None:
        x, residual = torch.zeros(2, 300, columns, dtype=dtype).unbind()
        a, _, _ = add_norm_op.prepare(
            x, residual, *torch.zeros(2, columns).unbind(), kind=kind, **dropout
        )
        backend = add_norm_op.backends["triton"]
        normed, *saved = backend.forward(a)
        backend.backward(a, (normed, normed), saved, [True] * 4)

    return run


def rotary(
    name: str, dtype: torch.dtype, head_dim: int, eight: torch.dtype | None = None
) -> Callable[[], Any]:
    """Return a shared case; ``eight`` selects an 8-bit cache."""

    def run() -> None:
        found = case(name).resize(D=head_dim)
        op = rotary_op if found.op == "rotary" else append_kv_op
        args, kwargs = found.make("cpu", dtype, seed=0)
        if eight is not None:
            stored = [quantize_kv(t, eight) for t in args[3][:2]]
            cache = KeyValues(
                *(rows for rows, _ in stored), args[3].page_table, *(scale for _, scale in stored)
            )
            args = (*args[:3], cache, *args[4:])
        a, _, _ = op.prepare(*args, **kwargs)
        out, *saved = op.backends["triton"].forward(a)
        if not found.forward_only:
            op.backends["triton"].backward(a, (out,), saved, [True, a.weight is not None])

    return run


def cross_entropy(dtype: torch.dtype, classes: int, **kwargs: Any) -> Callable[[], Any]:
    def run() -> None:
        x, weight, target = (
            torch.zeros(3, 16, dtype=dtype),
            torch.zeros(classes, 16, dtype=dtype),
            torch.zeros(3, dtype=torch.int64),
        )
        a, _, _ = linear_cross_entropy_op.prepare(
            x, weight, target, bias=torch.zeros(classes), **kwargs
        )
        backend = linear_cross_entropy_op.backends["triton"]
        loss, *saved = backend.forward(a)
        backend.backward(a, (loss,), saved[:5], [True] * 3)

    return run


def compiled(capability: int, run: Callable[[], Any], only: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (kernel name, compiled kernel) of each launch that matches the pattern ``only``."""
    kernels: list[tuple[str, Any]] = []

    def observe(kernel: Any, arguments: tuple[Any, ...], options: dict[str, int]) -> None:
        if re.search(only, kernel.fn.__name__):
            decode = " decode" * any(getattr(x, "PACK_GQA", False) for x in arguments)
            kernels.append(
                (kernel.fn.__name__ + decode, kernel.warmup(*arguments, grid=(1,), **options))
            )

    triton.runtime.driver.set_active(Driver(capability))
    attention_tiles.capability = lambda device: capability
    with _lang.observed(observe):
        run()
    yield from kernels


def resources(kernel: Any) -> dict[str, int]:
    """Return registers, stack, shared memory in bytes, matrix instructions and all instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
        sass = subprocess.run(
            [TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()
    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": kernel.metadata.shared,
        "products": len(re.findall(r"\b(?:HMMA|HGMMA|UTC\w*MMA)\b", sass)),
        "wgmma": len(re.findall(r"\bHGMMA\b", sass)),
        "instructions": len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/", sass, re.M)),
    }


def committed() -> dict[str, Any]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def measure(
    architectures: tuple[int, ...], only: str = ""
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return resources by "sm_… problem kernel", and errors.

    On Hopper an error is a hot kernel without wgmma, or repeated operands.
    """
    table, wrong = {}, []
    for capability in architectures:
        for name, run, kernels in problems():
            if capability == 120 and REFUSED.match(name):
                continue
            for kernel, binary in (
                compiled(capability, run, kernels) if re.search(only, name) else ()
            ):
                key = (
                    f"sm_{capability} {name}"
                    f" {kernel.removeprefix('attention_').removeprefix('feed_forward_')}"
                )
                table[key] = resources(binary)
                if not table[key].pop("wgmma") and WGMMA.match(key):
                    wrong.append(f"{key}: no wgmma")
                wrong += [f"{key}: {operand}" for operand in repeated(binary)]
                print(f"{key:45} {table[key]}", flush=True)
    return table, wrong


def repeated(kernel: Any) -> list[str]:
    """Return mma.sync operands with less K than 4 threads of kWidth numbers need.

    Threads repeat each other's operands, and Triton 3.6 multiplies them all the same. See
    apart_from_products in kernels/_lang.py.
    """
    operand = r"tensor<\d+x(\d+)x\w+, #ttg\.dot_op<{opIdx = 0, parent = #\w+, kWidth = (\d+)}>> \*"
    found = {(int(k), int(width)) for k, width in re.findall(operand, kernel.asm["ttgir"])}
    return [f"kWidth {width} of a product over {k}" for k, width in sorted(found) if k < 4 * width]


def unused() -> list[str]:
    """Return the entries of the configuration tables that no problem uses."""
    seen: set[tuple[Any, ...]] = set()
    looked_up = attention_tiles.config, network_tiles.config

    def attention_config(
        kernel: str, capability: int, head_dim: int, itemsize: int, **options: Any
    ) -> Any:
        seen.add(
            (*attention_tiles.entry_of(kernel, head_dim, itemsize, options["score_mods"]), itemsize)
        )
        return looked_up[0](kernel, capability, head_dim, itemsize, **options)

    def network_config(
        kernel: str, capability: int, rows: int, itemsize: int, *options: Any
    ) -> Any:
        seen.add((kernel, network_tiles.rows_class(rows), itemsize))
        return looked_up[1](kernel, capability, rows, itemsize, *options)

    attention_tiles.config, network.config, attention_tiles.capability = (
        attention_config,
        network_config,
        lambda device: 90,
    )
    with _lang.observed(lambda *launch: None):
        for _, run, _ in problems():
            run()
    attention_tiles.config, network.config = looked_up
    tables = {2: attention_tiles.SIXTEEN_BIT, 4: attention_tiles.THIRTY_TWO_BIT}
    expected = {
        (name, size, itemsize)
        for itemsize, table in tables.items()
        for name in table
        for size in table[name]
    }
    classes = [network_tiles.rows_class(n) for n in (1, 40, 100)]
    expected |= {
        (name, rows, size)
        for name, table in network_tiles.HEURISTIC.items()
        for size in table
        for rows in classes
    }
    return [
        f"no problem here for the configuration {entry}"
        for entry in sorted(expected - seen, key=str)
    ]


def faults(table: dict[str, dict[str, int]]) -> list[str]:
    """Return the faults of kernels: too large, no matrix instructions, or spills.

    Spills count if the table's Triton compiled the kernel.
    """
    found = []
    for key, used in table.items():
        capability = int(key.split()[0].removeprefix("sm_"))
        if used["shared"] > SHARED_LIMIT[capability]:
            found.append(
                f"{key}: {used['shared']} bytes of shared memory, at most"
                f" {SHARED_LIMIT[capability]} are there"
            )
        rowwise = re.search(
            "norm|rotary|append|cross_entropy|preprocess|combine|mask_blocks|mask_lists", key
        )  # no products
        if (
            used["stack"]
            and not SPILLING.search(key)
            and committed().get("triton") == triton.__version__
        ):
            found.append(f"{key}: {used['stack']} bytes of stack")
        if not used["products"] and "bf16" in key and not rowwise:
            found.append(f"{key}: no matrix instruction")
        if used["products"] and " fp32" in key:
            found.append(f"{key}: matrix instructions, which round float32 to tf32")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch", type=int, nargs="*", default=[90], help=f"of {ARCHITECTURES}; default 90"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write these architectures' part of the table, not compare",
    )
    parser.add_argument("--only", default="", help="problems in whose name this pattern is found")
    options = parser.parse_args()
    table, wrong = measure(tuple(options.arch), options.only)
    recorded = committed()
    names = tuple(f"{name} " for name, *_ in problems() if re.search(options.only, name))
    expected = {}
    for key, used in recorded.get("kernels", {}).items():
        architecture, _, rest = key.partition(" ")
        if int(architecture.removeprefix("sm_")) in options.arch and (
            not options.only or rest.startswith(names)
        ):
            expected[key] = used
    wrong += faults(table) + unused()
    if options.write:
        rest = {k: v for k, v in recorded.get("kernels", {}).items() if k not in expected}
        kernels = dict(sorted((rest | table).items()))
        lines = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in kernels.items())
        TABLE.write_text(
            f'{{\n  "triton": "{triton.__version__}",\n  "kernels": {{\n{lines}\n  }}\n}}\n'
        )
    elif recorded.get("triton") == triton.__version__:
        keys = sorted(expected.keys() | table.keys())
        wrong += [
            f"{k}: {table.get(k)}, the table has {expected.get(k)}"
            for k in keys
            if table.get(k) != expected.get(k)
        ]
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
