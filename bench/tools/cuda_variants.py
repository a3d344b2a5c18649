"""Times the kernels for sm_90a beside variants of them: other tiles, stages and orders, compiled from changed copies of csrc.

    python bench/tools/cuda_variants.py --list
    python bench/tools/cuda_variants.py --out variants.json             # on a Hopper GPU, with nvcc
    python bench/tools/cuda_variants.py --check --only "three consumers"   # without one: compile, and run in the emulator

A variant whose results err more than the committed kernels' by half is reported and not timed; the others are timed by turns with
these. Each is a library of its own with raw ops of its own name. A variant that is faster by more than the noise is worth a change of
csrc/cuda/attention/sm90/config.h or csrc/cuda/matmul/sm90/config.h. Exit code 2: there is no such GPU, or no nvcc.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

import pytransformer as pt
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.testing import bounds

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CONFIG, PLAN, MATMUL = "attention/sm90/config.h", "attention/sm90/plan.h", "matmul/sm90/config.h"
PRODUCTS = ("matmul", "feed_forward", "cross_entropy")  # folders that stand on products by warpgroups
NOTHING_TO_RUN_ON = 2
WORSE = 1.5  # times the committed kernels' error: beyond that it is not the same computation
ROUNDS, WARM_UP = 12, 3
FORWARD = "sm90_forward_tile(int head_dim, [[maybe_unused]] bool has_score_mod) {\n  return "


class Variant(NamedTuple):
    name: str
    passes: str  # "forward" or "backward" of attention, or "products": what it changes
    head_dims: tuple[int, ...]
    file: str  # below csrc/cuda
    old: str  # wherever it occurs
    new: str
    spills: bool = False  # ptxas spills a few registers; timed all the same: what is faster so would be worth making fit


def bounds_only_tile(head_dim: int, tile: str) -> tuple[str, str, str]:
    """Another tile of the forward kernels that know only bounds."""
    return CONFIG, FORWARD, f"{FORWARD}head_dim == {head_dim} && !has_score_mod ? Sm90Tile{{{tile}}} : "


def product_tile(name: str, old: str, new: str) -> Variant:
    """Another tile of the products by warpgroups."""
    return Variant(f"products: {name}", "products", (), MATMUL, old, new)


VARIANTS = (
    Variant("64: three consumers", "forward", (64,), *bounds_only_tile(64, "64, 128, 2, false, 3, 32, 160"), spills=True),
    Variant("64: no turns", "forward", (64,), *bounds_only_tile(64, "64, 128, 2, false")),
    Variant("64: 176 keys", "forward", (64,), *bounds_only_tile(64, "64, 176, 2, true")),
    Variant("64: 192 keys, no turns", "forward", (64,), *bounds_only_tile(64, "64, 192, 2, false")),
    Variant("64: three stages", "forward", (64,), *bounds_only_tile(64, "64, 128, 3, true")),
    Variant("128: 176 keys", "forward", (128,), *bounds_only_tile(128, "128, 176, 2"), spills=True),
    Variant("128: 160 keys", "forward", (128,), *bounds_only_tile(128, "128, 160, 2")),
    Variant("128: turns", "forward", (128,), *bounds_only_tile(128, "128, 128, 2, true")),
    Variant("128: 176 keys, turns", "forward", (128,), *bounds_only_tile(128, "128, 176, 2, true"), spills=True),
    Variant("256: 80 keys", "forward", (256,), *bounds_only_tile(256, "256, 80, 2")),
    Variant("256: turns", "forward", (256,), *bounds_only_tile(256, "256, 64, 2, true")),
    Variant(
        "d_query 128: 80 keys",
        "backward",
        (128,),
        CONFIG,
        "Sm90Tile{128, has_score_mod ? 64 : 96, 2}",
        "Sm90Tile{128, has_score_mod ? 64 : 80, 2}",
    ),
    Variant(
        "d_key 64: three stages",
        "backward",
        (64,),
        CONFIG,
        "has_score_mod ? 96 : 128, 2, false, 2, 40",
        "has_score_mod ? 96 : 128, 3, false, 2, 40",
    ),
    Variant(
        "d_key 128: three stages",
        "backward",
        (128,),
        CONFIG,
        "has_score_mod ? 48 : 64, 2, false, 2, 40",
        "has_score_mod ? 48 : 64, 3, false, 2, 40",
    ),
    Variant(
        "d_query 256: 48 keys, two stages",
        "backward",
        (256,),
        CONFIG,
        "Sm90Tile{256, 64, 2, false, 2, 24, 240, 1}",
        "Sm90Tile{256, 48, 2}",
    ),
    Variant("sections of 16 MB", "forward", (128,), PLAN, "kSectionBytes = 32 << 20", "kSectionBytes = 16 << 20"),
    Variant("sections of 48 MB", "forward", (128,), PLAN, "kSectionBytes = 32 << 20", "kSectionBytes = 48 << 20"),
    product_tile("no lead", "lead = 3;", "lead = 0;"),
)


def check_texts(variants: Sequence[Variant] = VARIANTS) -> None:
    """Each text to be replaced is in its file, or the variant would be none."""
    for variant in variants:
        count = (CSRC / "cuda" / variant.file).read_text().count(variant.old)
        if count != 1:
            raise ValueError(f"{variant.name}: its text is {count} times in {variant.file}, wanted once: {variant.old!r}")


def changed_sources(variant: Variant, directory: Path) -> Path:
    """A copy of csrc/cuda with the variant in it; returns what stands for csrc."""
    shutil.copytree(CSRC / "cuda", directory / "cuda", dirs_exist_ok=True)
    changed = directory / "cuda" / variant.file
    changed.write_text(changed.read_text().replace(variant.old, variant.new))
    return directory


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded


# ---- libraries for a GPU


def build(variants: Sequence[Variant], directory: Path) -> dict[str, str]:
    """Compiles a library for each variant and one of the sources as they are; returns what went wrong, by name.

    All at once, by ninja. What no variant changes is compiled once. Spills are no error: see refused().
    """
    sys.path.insert(0, str(CSRC))
    builder = module(CSRC / "native_build.py")
    os.environ |= {"PYTRANSFORMER_CUDA_ARCHS": "sm_90a", "PYTRANSFORMER_CUDA_SPILLS": "1"}
    nvcc, torch_folder, compiler = builder.cuda_build.find_nvcc(), builder.find_torch(), builder.find_compiler()
    checked = f"{sys.executable} {CSRC / 'cuda_build.py'} $out $out.log {nvcc} $flags -c $in -o $out"
    hidden = "-Xlinker=--exclude-libs,ALL"  # each has a CUDA runtime of its own
    lines = [
        "rule nvcc", f"  command = {checked}", "rule cxx", f"  command = {' '.join(compiler)} $flags -c $in -o $out",
        "rule link", f"  command = {nvcc} -shared -cudart=static {hidden} $in -L {torch_folder / 'lib'} -ltorch_cpu -o $out",
    ]  # fmt: skip

    def compiled(csrc: Path, source: Path, output: str, edge: Sequence[str] = ()) -> str:
        includes = ["-I", str(csrc), "-I", str(CSRC)]
        if source.suffix == ".cu":
            flags = [*builder.cuda_build.flags(source), *includes]
        else:
            flags = [
                *builder.COMMON_FLAGS,
                "-O2",
                *builder.STABLE_ABI_FLAGS,
                *includes,
                "-isystem",
                str(torch_folder / "include"),
                *edge,
            ]
        lines.extend(
            [f"build {output}: {'nvcc' if source.suffix == '.cu' else 'cxx'} {source}", f"  flags = {' '.join(flags)}"]
        )
        return output

    folders = [CSRC / "cuda" / folder for folder in ("attention", *PRODUCTS)]
    everything = [*(path for folder in folders for path in sorted(folder.glob("*.cu"))), CSRC / "cuda" / "device.cu"]
    edges = [path for folder in folders for path in sorted(folder.glob("*.cpp"))]
    shared = {path: compiled(CSRC, path, f"shared/{object_name(path)}") for path in everything}
    for variant in (None, *variants):
        name, csrc = (variant.name, directory / slug(variant.name)) if variant else ("", CSRC)
        # What is timed is bfloat16: other kernels of float16 would take half of the time that there is for compiling.
        changed = [path for path in everything if variant and depends(path, variant) and not path.stem.endswith("_f16")]
        edge = [f'-DPT_EDGE_PREFIX=\\"{prefix_of(name)}\\"']
        objects = [
            compiled(csrc, csrc / path.relative_to(CSRC), f"{slug(name)}.d/{object_name(path)}", edge)
            for path in (*edges, *changed)
        ]
        objects += [output for path, output in shared.items() if path not in changed]
        lines.append(f"build {slug(name)}.so: link {' '.join(objects)}")
    (directory / "build.ninja").write_text("\n".join(lines) + "\n")
    done = subprocess.run([builder.find_ninja(), "-C", str(directory), "-k", "0"], capture_output=True, text=True)
    failed = {}
    for name in ("", *(variant.name for variant in variants)):
        if not (directory / f"{slug(name)}.so").exists():
            told = [line for log in directory.glob(f"{slug(name)}.d/*.log") for line in log.read_text().splitlines()]
            failed[name] = "\n".join([line for line in told if "error" in line][:5]) or done.stdout[-2000:]
    return failed


def refused(folder: Path) -> list[str]:
    """Of the logs in it what ptxas tells of spills and of wgmma that it serialised."""
    found = module(CSRC / "cuda_build.py").REFUSED
    return [
        line.strip() for log in sorted(folder.glob("*.log")) for line in log.read_text().splitlines() if found.search(line)
    ]


def depends(source: Path, variant: Variant) -> bool:
    """Whether a file of kernels sees what the variant changes: its pass, and the choice of kernels."""
    if variant.passes == "products":
        return source.parent.name in PRODUCTS
    kernels = {"forward": ("sm90_fwd",), "backward": ("sm90_bwd_dq", "sm90_bwd_dkdv", "sm90_bwd_fused")}[variant.passes]
    return source.parent.name == "attention" and (source.stem == "attention" or source.stem.startswith(kernels))


def object_name(source: Path) -> str:
    return f"{source.parent.name}_{source.name}.o"


def slug(name: str) -> str:
    return "variant_" + "".join(c if c.isalnum() else "_" for c in name) if name else "committed"


def prefix_of(name: str) -> str:
    """What the names of a library's raw ops begin with."""
    return f"{slug(name)}_"


@contextlib.contextmanager
def raw_ops(name: str) -> Iterator[None]:
    """The backend "cuda" calls the ops of that variant's library."""
    before, cuda_library.PREFIX = cuda_library.PREFIX, prefix_of(name)
    try:
        yield
    finally:
        cuda_library.PREFIX = before


# ---- measuring


class Attention(NamedTuple):
    passes: str
    head_dim: int
    length: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.passes} D{self.head_dim} L{self.length}{' causal' if self.causal else ''}"

    def takes(self, variant: Variant) -> bool:
        return variant.passes == self.passes and self.head_dim in variant.head_dims

    def shape(self, small: bool) -> tuple[int, int, int, int]:
        """16,384 tokens of 2,048 columns, or few."""
        batch, heads = (1, 1) if small else (max(1, 16384 // self.length), 2048 // self.head_dim)
        return batch, heads, min(self.length, 2048) if small else self.length, self.head_dim

    def inputs(self, small: bool) -> list[torch.Tensor]:
        """query, key, value, grad_out."""
        return normal(*[self.shape(small)] * 4)

    def call(self, tensors: Sequence[torch.Tensor], backend: str = "cuda") -> Callable[[], list[torch.Tensor]]:
        *qkv, grad = tensors
        causal = "top_left" if self.causal else None
        if self.passes == "forward":
            return lambda: [pt.attention(*(t.detach() for t in qkv), causal=causal, backend=backend, strict=True)]
        out = pt.attention(*qkv, causal=causal, backend=backend, strict=True)
        return lambda: list(torch.autograd.grad(out, qkv, grad, retain_graph=True))

    def flops(self) -> float:
        batch, heads, length, head_dim = self.shape(small=False)
        return (
            4 * batch * heads * length**2 * head_dim * (0.5 if self.causal else 1) * (1 if self.passes == "forward" else 2.5)
        )


class Products(NamedTuple):
    """feed_forward with `wide` hidden columns, or linear_cross_entropy with as many classes, of 8,192 rows of `d` columns."""

    op: str
    backward: bool
    d: int
    wide: int
    activation: str = ""

    def __str__(self) -> str:
        return f"{self.op} {'backward' if self.backward else 'forward'} {self.d} x {self.wide} {self.activation}".rstrip()

    def takes(self, variant: Variant) -> bool:
        return variant.passes == "products"

    def inputs(self, small: bool) -> list[torch.Tensor]:
        rows, d, wide = (300, 512, 1100) if small else (8192, self.d, self.wide)
        if self.op == "linear_cross_entropy":
            return normal((rows, d), (wide, d))
        return normal((rows, d), (wide, d), (d, wide), (rows, d))

    def call(self, tensors: Sequence[torch.Tensor], backend: str = "cuda") -> Callable[[], list[torch.Tensor]]:
        *weighted, last = tensors
        if self.op == "linear_cross_entropy":
            leaves, grad = list(tensors), None
            target = torch.arange(len(tensors[0]), device=last.device) % len(last)
            forward = lambda x, w: pt.linear_cross_entropy(x, w, target, backend=backend, strict=True)
        else:
            leaves, grad = weighted, last
            keywords = {"activation": self.activation, "dropout_p": 0.1, "dropout_seed": 1, "backend": backend, "strict": True}
            forward = lambda x, w1, w2: pt.feed_forward(x, w1, None, w2, None, **keywords)
        if not self.backward:
            return lambda: [forward(*(t.detach() for t in leaves))]
        out = forward(*leaves)
        return lambda: list(torch.autograd.grad(out, leaves, grad, retain_graph=True))

    def flops(self) -> float:
        """Of all products, the library's too."""
        products = {"feed_forward": (2, 4), "linear_cross_entropy": (1, 3)}[self.op][self.backward]
        return 2.0 * products * 8192 * self.d * self.wide


CASES = [
    *(
        Attention(passes, head_dim, length, causal)
        for passes, head_dims in (("forward", (64, 128, 256)), ("backward", (64, 128, 256)))
        for head_dim in head_dims
        for length in (2048, 8192)
        for causal in (False, True)
    ),
    *(
        Products(op, backward, d, wide, activation)
        for op, wides, activation in (
            ("feed_forward", (4096, 16384), "relu"),
            ("feed_forward", (4096, 16384), "gelu"),
            ("linear_cross_entropy", (32768, 32768), ""),
        )
        for d, wide in zip((1024, 4096), wides)
        for backward in (False, True)
    ),
]


def normal(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Numbers of about the size that activations have; the last is the gradient of a result, or needs one too."""
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def error(case: Attention | Products, name: str, exact: Sequence[torch.Tensor]) -> float:
    with raw_ops(name):
        found = case.call(case.inputs(small=True))()
    return max(bounds.relative_error(f, e) for f, e in zip(found, exact))


def measure(case: Attention | Products, names: Sequence[str]) -> dict[str, Any]:
    """Error and TFLOP/s by name; "" is what is committed."""
    exact = case.call(case.inputs(small=True), "reference")()
    errors = {name: error(case, name, exact) for name in names}
    right = [name for name in names if errors[name] <= WORSE * errors[""]]
    calls, times = {}, {name: [] for name in right}
    for name in right:
        with raw_ops(name):
            calls[name] = case.call(case.inputs(small=False))
    for _ in range(ROUNDS + WARM_UP):
        for name in right:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with raw_ops(name):
                start.record()
                calls[name]()
                end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    rates = {name: round(case.flops() / statistics.median(t[WARM_UP:]) / 1e9, 1) for name, t in times.items()}
    return {"case": str(case), "errors": errors, "tflops": rates, "wrong": [name for name in names if name not in right]}


def run(variants: Sequence[Variant], directory: Path, out: Path | None) -> int:
    for variant in variants:
        changed_sources(variant, directory / slug(variant.name))
    failed = build(variants, directory)
    for name, why in failed.items():
        print(f"{name or 'the committed sources'} does not compile:\n{why}", file=sys.stderr)
    if "" in failed:
        return 1
    built = [variant for variant in variants if variant.name not in failed]
    for name in ("", *(variant.name for variant in built)):
        torch.ops.load_library(directory / f"{slug(name)}.so")
    spills = {v.name: lines for v in built if (lines := refused(directory / f"{slug(v.name)}.d"))}
    results: list[dict[str, Any]] = []
    for case in CASES:
        names = ["", *(v.name for v in built if case.takes(v))]
        if len(names) == 1:
            continue
        results.append(measure(case, names))
        base = results[-1]["tflops"][""]
        told = (f"{n} {rate} ({rate / base:.3f})" for n, rate in results[-1]["tflops"].items() if n)
        print(f"{case}: committed {base} TFLOP/s; {'; '.join(told)}; wrong: {results[-1]['wrong'] or 'none'}", flush=True)
        if out:  # after each case: a run cut short leaves what it found
            facts = {
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "not_compiled": sorted(failed),
                "spills": spills,
            }
            out.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")
    return int(any(result["wrong"] for result in results))


# ---- without a GPU


def check(variant: Variant, directory: Path) -> list[str]:
    """What is wrong with a variant: nvcc's complaints (spills are among them), then what the emulator finds in the tests' problems."""
    csrc = changed_sources(variant, directory / slug(variant.name))
    found = []
    sys.path.insert(0, str(CSRC))
    builder = module(CSRC / "native_build.py").cuda_build
    if nvcc := builder.find_nvcc():
        os.environ["PYTRANSFORMER_CUDA_ARCHS"] = "sm_90a"
        for source in (path for path in sorted(csrc.glob("cuda/*/*.cu")) if depends(path, variant)):
            output = directory / "x.o"
            command = [nvcc, *builder.flags(source), "-I", str(csrc), "-c", str(source), "-o", str(output)]
            if builder.compile_checked(output, directory / "x.log", command) and not (variant.spills and refused(directory)):
                found.append(f"nvcc refuses {source.name}: {refused(directory) or (directory / 'x.log').read_text()[-500:]}")
    else:
        found.append("nvcc was not found, so that nothing is known of registers")
    emulator = module(CSRC / "emulator" / "build.py")
    if variant.passes == "products":
        stem, only, problems = "*", "[cfm]*/*.c*", ("matmul_problems", "feed_forward_problems", "cross_entropy_problems")
    else:
        stem, only, problems = "attention", "[as]*", ("sm90_problems",)
    library = emulator.library(directory / slug(variant.name) / "build", csrc, stem, only)
    environment = os.environ | {"PYTRANSFORMER_EMULATE": str(library), "PYTRANSFORMER_CUDA_PATH": "sm90"}
    for name in problems:
        script = [sys.executable, str(ROOT / "tests" / "emulator" / "run_problems.py"), name, "1"]
        done = subprocess.run(script, capture_output=True, text=True, env=environment)
        if done.returncode:
            found.append(f"the emulator: {done.stdout}{done.stderr[-2000:]}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the variants, and do nothing else")
    parser.add_argument("--check", action="store_true", help="compile them and run them in the emulator; needs no GPU")
    parser.add_argument("--only", default="", help="those whose name holds this")
    parser.add_argument("--kernels", choices=("attention", "products"), help="those of these kernels")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    options = parser.parse_args(arguments)
    kernels = {"attention": ("forward", "backward"), "products": ("products",), None: ("forward", "backward", "products")}
    variants = [v for v in VARIANTS if options.only in v.name and v.passes in kernels[options.kernels]]
    check_texts(variants)
    if not variants:
        parser.error(f"no variant's name holds {options.only!r}; --list names them")
    if options.list:
        print(
            "\n".join(
                f"{v.name} ({v.passes}{', head size '[: 12 * bool(v.head_dims)]}{', '.join(map(str, v.head_dims))})"
                for v in variants
            )
        )
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if options.check:
            wrong = {variant.name: check(variant, Path(folder)) for variant in variants}
            told = {
                variant.name: "right, but spills" if variant.spills else "right, and without spills" for variant in variants
            }
            print("\n".join(f"{name}: {'; '.join(found) or told[name]}" for name, found in wrong.items()))
            return int(any(wrong.values()))
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            print("cuda_variants: needs a GPU of compute capability 9.0; --check needs none", file=sys.stderr)
            return NOTHING_TO_RUN_ON
        return run(variants, Path(folder), options.out)


if __name__ == "__main__":
    sys.exit(main())
