# SPDX-License-Identifier: Apache-2.0
"""Triton's JIT and launcher with a stub in place of the driver.

CPU tensors imitate a GPU's, so results are arbitrary memory. A launch is bound, specialized and
lowered to Triton's IR as usual, then launched by Triton's compiled launcher. The stub compares
every parameter with the intended argument. TRITON_INTERPRET must not be set: tests run this in
processes.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ir, make_backend

from pytransformer.kernels.attention import configs
from pytransformer.ops._backends.gpu import attention as gpu_attention
from pytransformer.ops._backends.gpu import cross_entropy as gpu_cross_entropy
from pytransformer.ops._backends.triton import availability
from pytransformer.ops._backends.triton import rotary as triton_rotary

SOURCE = Path(__file__).with_name("driver.c")
BYTES = {"i1": 1, "i8": 1, "i32": 4, "f32": 4, "i64": 8}
NOTHING_SPECIAL = types.SimpleNamespace(
    num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
    profile_scratch_align=1,
    launch_cooperative_grid=False, launch_pdl=False, tensordesc_meta=None,
)  # fmt: skip


class Stub:
    """The stub driver, compiled into a folder and loaded before Triton loads the real one."""

    def __init__(self, folder: Path) -> None:
        library = folder / "libcuda.so.1"
        compiler = os.environ.get("CC", "cc").split()
        subprocess.run(
            [
                *compiler,
                "-shared",
                "-fPIC",
                "-Wl,-soname,libcuda.so.1",
                str(SOURCE),
                "-o",
                str(library),
            ],
            check=True,
        )
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        self.library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.values = (ctypes.c_uint64 * 512).in_dll(self.library, "stub_values")
        self.sizes = (ctypes.c_int * 512).in_dll(self.library, "stub_sizes")
        self.grid = (ctypes.c_uint * 3).in_dll(self.library, "stub_grid")

    def number(self, name: str) -> Any:
        return ctypes.c_int.in_dll(self.library, f"stub_{name}")


class Driver:
    """Triton's utilities and launcher for a GPU of this architecture."""

    def __init__(self, capability: int) -> None:
        from triton.backends.nvidia import driver as nvidia

        self.target = GPUTarget("cuda", capability, 32)
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = nvidia.CudaLauncher

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Gpu:
    """A stub GPU: within ``pretended`` the Triton backends run on CPU tensors.

    It collects the errors.
    """

    def __init__(self, capability: int, folder: Path) -> None:
        self.stub = Stub(folder)
        self.variants: Counter[str] = Counter()  # lowered kernels
        self.launches = 0
        self.wrong: list[str] = []
        triton.runtime.driver.set_active(Driver(capability))
        configs.capability = lambda device: capability // 10 * 10
        availability._unavailable = lambda device, name: None  # type: ignore[assignment]
        for backend in (
            gpu_attention,
            gpu_cross_entropy,
            triton_rotary,
        ):  # as on a GPU, where no call waits
            backend.looks_at_values = lambda device: False  # type: ignore[attr-defined]
        caches = triton.JITFunction.create_binder

        def binder(kernel: Any) -> Any:
            made = caches(kernel)
            kernel.compile = self.lower
            return made

        triton.JITFunction.create_binder = binder

    def lower(self, src: Any, target: Any, options: dict[str, Any], **_: Any) -> Lowered:
        backend = make_backend(target)
        parsed = backend.parse_options(dict(options, **src.parse_options()))
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        generators = backend.get_codegen_implementation(parsed)
        module = src.make_ir(target, parsed, generators, backend.get_module_map(), context)
        self.variants[src.fn.fn.__name__] += 1
        if not parsed.enable_fp_fusion:
            self.wrong.append(
                f"{src.fn.fn.__name__}: without fused multiply-add, as 3.9 compiles unless told"
                " otherwise"
            )
        return Lowered(self, src, str(module), parsed.num_warps)

    def check(self, kernel: Lowered, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Compare every parameter with the intended argument."""
        self.launches += 1
        name = kernel.fn.fn.__name__
        meant = [
            x for p, a in zip(kernel.fn.params, arguments) if not p.is_constexpr for x in _leaves(a)
        ]
        if len(meant) != len(kernel.parameters):
            self.wrong.append(
                f"{name}: {len(meant)} arguments for {len(kernel.parameters)} parameters"
            )
            return
        for place, (kind, x) in enumerate(zip(kernel.parameters, meant)):
            if self.stub.values[place] != _bits(kind, x):
                self.wrong.append(
                    f"{name}: parameter {place}, {kind}: {self.stub.values[place]:#x} arrived for"
                    f" {x!r:.80}"
                )
        if tuple(self.stub.grid) != grid or self.stub.number("threads").value != 32 * kernel.warps:
            self.wrong.append(
                f"{name}: grid {tuple(self.stub.grid)} of {self.stub.number('threads').value}"
                " threads arrived"
            )


class Lowered:
    """A substitute for a compiled kernel: Triton's launcher with a stub function."""

    function = 3

    def __init__(self, gpu: Gpu, src: Any, text: str, warps: int) -> None:
        self.gpu, self.fn, self.warps = gpu, src.fn, warps
        self.packed_metadata = (warps, 1, 0)
        self.launcher = triton.runtime.driver.active.launcher_cls(src, NOTHING_SPECIAL)
        header = re.search(r"tt\.func public @\w+\((.*?)\) attributes", text, re.S)
        assert header is not None, text[:500]
        self.parameters = re.findall(r"%[\w.]+: (!tt\.ptr<\w+>|\w+)", header[1])

    def launch_metadata(self, *launch: Any) -> None:
        return None

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        """Return the launcher of this grid, like Triton's compiled kernels."""
        return lambda *arguments, stream: self.run(
            *grid, stream, self.function, self.packed_metadata, None, None, None, *arguments
        )

    def run(self, *launch: Any) -> None:
        stub, arguments = (
            self.gpu.stub,
            launch[9:],
        )  # after grid, stream, function, two metadata and two hooks
        stub.number("count").value = len(self.parameters)
        for place, kind in enumerate(self.parameters):
            stub.sizes[place] = BYTES.get(kind, 8)
        before = stub.number("launches").value
        self.launcher(*launch)
        if stub.number("launches").value != before + 1:
            self.gpu.wrong.append(f"{self.fn.fn.__name__}: not launched")
        self.gpu.check(self, launch[:3], arguments)


def _leaves(argument: Any) -> Iterator[Any]:
    if isinstance(argument, tuple):
        for each in argument:
            yield from _leaves(each)
    elif argument is not None:
        yield argument


def _bits(kind: str, x: Any) -> int:
    """Return the bits that must arrive for x."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, float):
        return struct.unpack("I", struct.pack("f", x))[0] if kind == "f32" else -1
    return x & ((1 << 8 * BYTES.get(kind, 8)) - 1)  # also an address
