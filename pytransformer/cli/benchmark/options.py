# SPDX-License-Identifier: Apache-2.0
"""The options of `pytransformer bench` and their parsers."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytransformer.cli.benchmark import plan, results, suites
from pytransformer.cli.providers import ON_REQUEST, PEERS, VARIANTS

# The settings that pin PyTorch's kernels, MKL and oneDNN to an instruction set.
ISAS = {
    "avx512": ("avx512", "AVX512", "AVX512_CORE"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "generic": ("default", "SSE4_2", "SSE41"),
}
_KNOWN_BACKENDS = ("reference", "cpu", "triton", "cuda", *PEERS, *VARIANTS)
_NAMES = "NAME,..."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    # fmt: off
    # problems
    add("ops", nargs="*", metavar="OP", help=f"ops to run (default all): {', '.join(plan.OPS)}")
    add("--quick", action="store_true", help="every op at small shapes, in about a minute")
    add("--suite", choices=tuple(suites.SUITES),
        help="a fixed list of problems; aims, under 15 minutes, is what runs when nothing is asked"
        " for")
    add("--case", type=_words, default=[], metavar=_NAMES,
        help="cases by name (default: each op's core cases); --list shows them")
    add("--size", choices=("small", "medium", "large"), default="medium",
        help="shape of the cases (default medium)")
    add("--shape", type=shape, default={}, metavar="Lq=4096,...",
        help="change dimensions of the cases; L is Lq and Lk")
    add("--sweep", type=_sweep, default=[{}], metavar="L=512:4096",
        help="several sizes of a dimension: doubling from:to, or a,b,c; draws speed and memory"
        " against it")
    add("--dtype", type=_dtypes, metavar=_NAMES,
        help="float32 (default), bfloat16, float16, float64")
    add("--mode", type=_modes, metavar=_NAMES, help="fwd, bwd, fwd+bwd (default fwd,fwd+bwd)")
    # contenders
    add("--providers", "--backends", dest="backends", type=_backends, metavar=_NAMES,
        help="who takes part: reference, cpu, triton, cuda (ours), naive, torch (default: these),"
        f" or also {', '.join(ON_REQUEST)}; all")
    add("--contender", type=_contender, action="append", default=[], metavar="FILE.py",
        help="a file of yours with functions named after ops; checked and timed beside the rest"
        " (may be repeated; docs/benchmarks.md has an example)")
    add("--isa", choices=tuple(ISAS),
        help="limit our kernels and PyTorch's libraries to an instruction set")
    add("--device", choices=("cpu", "cuda"), default="cpu",
        help="where the tensors are (default cpu)")
    add("--threads", type=int, metavar="N",
        help="torch.set_num_threads(N) first (default: leave as it is)")
    # measurement
    add("--min-time", type=float, metavar="S",
        help=f"seconds of timing for each contender (default 0.3; in a suite {suites.MIN_TIME})")
    add("--sustained", type=float, default=0.0, metavar="S",
        help="also time calls after a rest, and S seconds of calls without one (default 0: not,"
        " but in a suite)")
    add("--cache", choices=("warm", "cold"), default="warm",
        help="cold: empty the CPU's caches before each call (default warm; on GPUs always cold)")
    # fmt: on
    for name, text in (
        ("verify", "check against float64 before timing (default on)"),
        ("memory", "measure peak memory (default on)"),
        ("peaks", "measure the roofs of the roofline (default on; not with --quick)"),
        ("plots", "draw plots (default on)"),
    ):
        add(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=text)
    # output
    add("--out", type=Path, metavar="DIR", help="folder (default ./results/bench-<date>)")
    add("--list", action="store_true", help="list the cases and stop")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _among(text: str, known: tuple[str, ...]) -> list[str]:
    words = _words(text)
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or 'nothing'} is not one of {', '.join(known)}"
        )
    return words


def _dtypes(text: str) -> list[str]:
    return [plan.dtype_name(plan.DTYPES[word]) for word in _among(text, tuple(plan.DTYPES))]


def _modes(text: str) -> list[str]:
    return _among(text, results.MODES)


def _backends(text: str) -> tuple[str, ...]:
    return _KNOWN_BACKENDS if text == "all" else tuple(_among(text, _KNOWN_BACKENDS))


def _contender(text: str) -> Path:
    path = Path(text)
    if path.stem in _KNOWN_BACKENDS:
        raise argparse.ArgumentTypeError(
            f"{path.name} has the name of an implementation, {path.stem}; rename the file"
        )
    return path


def shape(text: str) -> dict[str, int]:
    """Parse `Lq=4096,D=64`."""
    sizes: dict[str, int] = {}
    for word in _words(text):
        name, _, size = word.partition("=")
        sizes |= _sized(word, name, size)
    return sizes


def _sweep(text: str) -> list[dict[str, int]]:
    """Parse `L=512:4096` (doubling) or `L=512,1000,2048` into one shape per size."""
    name, _, sizes = text.partition("=")
    first, colon, last = sizes.partition(":")
    if not colon:
        return [_sized(text, name, size) for size in _words(sizes)] or [_sized(text, name, sizes)]
    size, end = (next(iter(_sized(text, name, n).values())) for n in (first, last))
    swept = []
    while size <= end:
        swept.append(_sized(text, name, str(size)))
        size *= 2
    if not swept:
        raise argparse.ArgumentTypeError(
            f"{text!r} goes from {first} down to {last}; the first must be the smaller"
        )
    return swept


def _sized(word: str, name: str, size: str) -> dict[str, int]:
    known = {name for found in plan.cases() for name in found.shape} | {"Dv", "L"}
    if name not in known or not size.isdecimal() or int(size) < 1:
        raise argparse.ArgumentTypeError(
            f"{word!r} is not NAME=SIZE with a NAME out of {', '.join(sorted(known))}"
        )
    return dict.fromkeys(("Lq", "Lk") if name == "L" else (name,), int(size))
