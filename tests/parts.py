# SPDX-License-Identifier: Apache-2.0
"""The parts of the test run, with their files and requirements; run_parts.py runs them."""

from __future__ import annotations

from typing import NamedTuple

REST = "cpu"  # all files and folders outside the other parts
NO_SLOW = "not gpu and not slow"  # pytest's markers; the last -m wins


class Part(NamedTuple):
    name: str
    title: str
    minutes: float  # on two cores of run_parts.NOMINAL's machine
    folders: tuple[str, ...] = ()  # paths in tests/; patterns in the parts of --full
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()  # for pytest
    # An environment variable: a folder with packages that precede the installed ones; unset: skip.
    needs: str = ""
    jobs: int = 1  # processes that compute at once


INSTALL = Part("install", "install and CPU build", 5, jobs=2)
CUDA_BUILD = Part("cuda-build", "CUDA build", 5, jobs=2)
BUILDS = (INSTALL, CUDA_BUILD)
INTERPRETED = (("TRITON_INTERPRET", "1"),)
TWO = ("-n", "2", "--dist", "loadfile")  # two processes; the tests of a file share fixtures
# With several processes, waiting threads must yield. OpenMP's default, spinning, takes the cores
# from the other process: 800 tests of attention in two processes of two threads took 167 to 220 s
# on two cores, and 39 s with this.
GIVE_WAY = (("OMP_WAIT_POLICY", "passive"),)
PARTS = (
    Part(REST, "reference and cpu", 10, options=TWO, jobs=2),
    Part("distributed", "several processes", 4, ("distributed",), jobs=2),
    Part("triton", "triton, interpreted and compiled", 7, ("triton",), INTERPRETED, TWO, jobs=2),
    Part("cuda", "CUDA conformance and resources", 3, ("cuda",)),
    # One thread each.
    Part("emulator", "CUDA kernels emulated", 7, ("emulator",), (), ("-n", "2"), jobs=2),
    Part(
        "models",
        "models and integrations",
        8,
        ("nn", "models", "integrations", "training", "viz"),
        (),
        TWO,
        jobs=2,
    ),
    Part("commands", "commands and benchmarks", 3, ("cli",), (), TWO, jobs=2),
)
# Repeated with another setting; --full repeats more.
WITHOUT_FAST_PATH = (("PYTRANSFORMER_FAST_PATH", "0"),)
SAMPLES = (
    Part(
        "fast-path-off",
        "a sample of the ops without the C++ fast path",
        1,
        ("ops/test_[acfl]*.py",),
        WITHOUT_FAST_PATH,
        ("-k", "cpu and not fuzz", *TWO),
        jobs=2,
    ),
)
# Parts of --full only: the ops on kernels that this machine would not select, under the sanitizers,
# and with other versions.
OPS = ("ops", "test_fuzz*.py")
ISA_VARIABLE = "PYTRANSFORMER_CPU_ISA"
ISAS = ("avx512_bf16", "avx512", "avx2", "generic")
# The reference has no instruction sets. The fast path's C++ and verification do not depend on them
# either, and took 18 of a set's 22 minutes.
NO_REFERENCE = (
    "-k",
    (
        "not reference and not fast_path_nodes and not fast_path_mutants and not fast_path_watched"
        " and not verification"
    ),
)
SANITIZE, TILES, BENCH = "sanitize", "software-tiles", "bench"
# Planted faults test the tests, whatever the version of Triton.
NO_FAULTS = ("-k", "not finds and not mutants")
# Tests that compare two roundings, under every setting that changes them: instruction set of ours
# and of PyTorch's libraries, threads, seeds. The settings are a covering array of strength 1, and
# of 2 in (PyTorch's set, threads). Planted faults and slow tests belong to the parts above.
ROUNDED = (
    "ops",
    "nn",
    "models",
    "integrations",
    "training",
    "regressions",
    "cpu/test_attention*.py",
    "test_fuzz*.py",
)
HELD = {
    "avx2": (
        ("ATEN_CPU_CAPABILITY", "avx2"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2"),
        ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
    ),
    "avx512": (
        ("ATEN_CPU_CAPABILITY", "avx512"),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"),
        ("MKL_ENABLE_INSTRUCTIONS", "AVX512"),
    ),
}


def again(
    name: str,
    title: str,
    folders: tuple[str, ...],
    options: tuple[str, ...] = (),
    environment: tuple[tuple[str, str], ...] = (),
    needs: str = "",
) -> Part:
    """Return a part of --full only, in two processes and without a budget."""
    return Part(name, title, 0, folders, environment, (*options, *TWO), needs, jobs=2)


def setting(isa: str, torch_isa: str, threads: int, seed: int) -> Part:
    environment = ((ISA_VARIABLE, isa), *HELD[torch_isa], ("OMP_NUM_THREADS", str(threads)))
    seeds = (f"--torch-seed={seed}", f"--fuzz-seed={seed}", "--fuzz-cases=300")
    title = f"setting {isa}, PyTorch {torch_isa}, threads {threads}, seed {seed}"
    return again(f"settings-{isa}", title, ROUNDED, ("-m", NO_SLOW, *seeds), environment)


SETTINGS = (
    setting("amx_bf16", "avx512", 2, 4),
    setting("avx512_bf16", "avx512", 1, 1),
    setting("avx512", "avx2", 2, 2),
    setting("avx2", "avx2", 1, 3),
    setting("generic", "avx512", 2, 1),
)
FULL_PARTS = (
    *(
        again(isa, f"cpu, instruction set {isa}", OPS, NO_REFERENCE, ((ISA_VARIABLE, isa),))
        for isa in ISAS
    ),
    *SETTINGS,
    again(
        "python-path",
        "ops without the C++ fast path",
        ("ops",),
        ("-k", "cpu or not reference"),
        WITHOUT_FAST_PATH,
    ),
    again(SANITIZE, "cpu under sanitizers", OPS, ("-k", "cpu", "--fuzz-cases=300")),
    again(
        TILES,
        "cpu, amx_bf16 with software tiles",
        (*OPS, "cpu/test_attention*.py"),
        NO_REFERENCE,
        ((ISA_VARIABLE, "amx_bf16"),),
    ),
    again(
        "transformers",
        "another transformers",
        ("models", "integrations"),
        needs="PYTRANSFORMER_TEST_TRANSFORMERS",
    ),
    again(
        "triton-3.6",
        "triton 3.6",
        ("triton",),
        NO_FAULTS,
        INTERPRETED,
        "PYTRANSFORMER_TEST_TRITON_3_6",
    ),
    again(
        "triton-3.9",
        "triton 3.9",
        ("triton",),
        NO_FAULTS,
        INTERPRETED,
        "PYTRANSFORMER_TEST_TRITON_3_9",
    ),
    again(
        "peers",
        "timm and diffusers",
        ("integrations/test_*librar*.py",),
        needs="PYTRANSFORMER_TEST_PEERS",
    ),
    Part(BENCH, "the benchmark suite", 0),
)
