# SPDX-License-Identifier: Apache-2.0
"""Print what works on this machine, why the rest does not, and a self-check.

The self-check compares forward and backward of a small problem of every op on
each working backend with float64. The exit code is 1 if a backend is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import pytransformer
from pytransformer.cli import OK, WRONG, machine, providers
from pytransformer.cli.benchmark import check, exact, plan, results
from pytransformer.console import Console, clean
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._core import fast_path, verification
from pytransformer.ops._core import native as cpu_library
from pytransformer.ops._core.registry import BACKENDS, OPS
from pytransformer.testing.cases import Case, cases

# The use of each optional library; calling an op needs none of them.
OPTIONAL = {
    "triton": "the triton backend",
    "matplotlib": "plots of benchmarks (extra `bench`)",
    "transformers": "pytransformer.integrations.transformers (extra `hf`)",
    "timm": "vision models to use the drop-in with",
    "safetensors": "loading weights (extra `models`)",
    "sacrebleu": "BLEU and chrF of a translator (extra `corpora`)",
    "polib": "gettext catalogues that are .po files alone (extra `corpora`)",
    "numpy": "tests (extra `test`)",
}

NATIVE_COST = (
    "CPU tensors run on the reference: right, but no faster than plain PyTorch code, and with"
    " memory that grows with the square of the length"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    report = examine()
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        show(Console(), report)
    return WRONG if any(line["verdict"] != "ok" for line in report["self_check"]) else OK


def examine() -> dict[str, Any]:
    """Return the report as plain data."""
    return {
        "installation": installation(),
        "cpu": cpu(),
        "native": native(),
        "cuda": cuda(),
        "gpu": gpu(),
        "backends": backends(),
        "verification": [verification_of(device) for device in devices()],
        "optional": {
            name: {"version": machine.version_of(name), "for": use}
            for name, use in OPTIONAL.items()
        },
        "self_check": self_check(),
    }


def installation() -> dict[str, Any]:
    return {
        "pytransformer": pytransformer.__version__,
        "path": str(Path(pytransformer.__file__).parent),
        "commit": results.commit(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": str(torch.__version__),
        "triton": machine.triton_version(),
        "system": platform.platform(),
    }


def cpu() -> dict[str, Any]:
    features = machine.cpu_features()
    return {
        "name": machine.cpu_name(),
        "cores": machine.usable_cores(),
        "threads": torch.get_num_threads(),
        "features": [name for name, present in features.items() if present],
        "features_absent": [name for name, present in features.items() if not present],
    }


def native() -> dict[str, Any]:
    """Return the CPU library's state: build targets, whether it loaded, its instruction set."""
    module, _ = machine.introspection()
    info = cpu_library.build_info() or {}
    wanted = os.environ.get("PYTRANSFORMER_CPU_ISA")
    reason, isa = cpu_library.why_not(f"{plan.OPS[0]}_fwd"), None
    if reason is None and module is not None:
        try:
            isa = module.default_isa()
        except RuntimeError as error:
            reason = str(error)
    built = info.get("cpu", {})
    return {
        "loaded": reason is None,
        "why_not": reason,
        "costs": None if reason is None else NATIVE_COST,
        "isa": isa,
        "isa_asked_for": wanted,
        "isas_built": module.built_isas() if module else built.get("isas", []),
        "isas_usable": module.usable_isas() if module else [],
        "isas_not_built": built.get("isas_not_built", {}),
        "note": machine.SOFTWARE_TILES if built.get("tiles_in_software") else None,
        "fast_path": "Python" if fast_path.why_not() else "C++",
        "fast_path_why_not": fast_path.why_not(),
        "compiler": info.get("compiler"),
        "built_with_torch": info.get("torch"),
    }


def cuda() -> dict[str, Any]:
    """Return the CUDA library's state: build targets, raw ops, and why they cannot run here."""
    info = (cpu_library.build_info() or {}).get(
        "cuda", {"built": False, "reason": "this copy was never built"}
    )
    why_not_loaded = cuda_library.why_not_loaded(f"{plan.OPS[0]}_fwd")
    names = torch._C._dispatch_get_all_op_names() if why_not_loaded is None else []
    reason = why_not_loaded
    if reason is None and not (reason := gpu()["why_not"]):
        reasons = [
            cuda_library.why_not(f"{plan.OPS[0]}_fwd", torch.device("cuda", i))
            for i in range(torch.cuda.device_count())
        ]
        reason = None if None in reasons else reasons[0]
    return {
        **info,
        "loaded": why_not_loaded is None,
        "ops": sorted(
            name.partition("::cuda_")[2]
            for name in names
            if name.startswith("pytransformer_C::cuda_")
        ),
        "why_not": reason,
    }


def gpu() -> dict[str, Any]:
    if torch.cuda.is_available():
        return {
            "devices": [
                f"{torch.cuda.get_device_name(i)}"
                f" (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})"
                for i in range(torch.cuda.device_count())
            ],
            "why_not": None,
        }
    if torch.version.cuda is None and torch.version.hip is None:
        reason = "this torch is built for the CPU only"
    elif not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        reason = "torch is built for GPUs, but the system shows none (no /dev/nvidiactl)"
    else:
        reason = (
            "the system has a GPU, but torch cannot use it: the driver may be older than this torch"
            " needs"
        )
    return {"devices": [], "why_not": reason}


def backends() -> list[dict[str, Any]]:
    """Return each backend with the ops that it computes here and the reasons for the rest."""
    return [
        _backend(
            backend,
            "cuda" if backend in ("triton", "cuda") and torch.cuda.is_available() else "cpu",
        )
        for backend in reversed(BACKENDS)
    ]


def _backend(backend: str, device: str) -> dict[str, Any]:
    works: list[str] = []
    reasons: dict[str, list[str]] = {}
    for op in plan.OPS:
        if backend not in OPS[op].backends:
            continue
        args, kwargs = next(c for c in _cases() if c.op == op).make(device, torch.float32, seed=0)
        reason = pytransformer.explain(op, *args, **kwargs).reasons[backend]
        if reason is None:
            works.append(op)
        else:
            reasons.setdefault(reason, []).append(op)
    if not works and not reasons:
        reasons["this version has no kernels of this backend"] = []
    return {
        "backend": backend,
        "works": works,
        "why_not": [{"reason": r, "ops": ops} for r, ops in reasons.items()],
    }


def _cases() -> list[Case]:
    """Return the problems of the self-check: each op once, attention with every feature at once."""
    return cases(size="small", tags={"self_check"})


def devices() -> list[torch.device]:
    return [
        torch.device("cpu"),
        *(torch.device("cuda", i) for i in range(torch.cuda.device_count())),
    ]


def verification_of(device: torch.device) -> dict[str, Any]:
    """Return the results in effect on the device, by op, backend and dtype."""
    content = verification.load_file(device)
    rows: dict[tuple[str, str, str], dict[str, Any]] = {
        key: {"right": 0, "not checked": 0, "declined": 0, "bad": []}
        for key in verification.shipped_names(device)
    }
    shipped = len(rows)
    for line in (content or {}).get("checks", []):
        key = line["op"], line["backend"], line["dtype"]
        row = rows.setdefault(key, {"right": 0, "not checked": 0, "declined": 0, "bad": []})
        if line["outcome"] in row:
            row[line["outcome"]] += 1
        else:
            row["bad"].append(verification.describe(line).removeprefix(verification.PREFIX))
    return {
        "device": str(device),
        "mode": verification.mode(),
        "shipped": shipped,
        "written": None if content is None else content.get("written", "by checks at first calls"),
        "order": (content or {}).get("order", {}),
        "rows": [dict(zip(("op", "backend", "dtype"), key)) | row for key, row in rows.items()],
    }


def self_check() -> list[dict[str, Any]]:
    """Check forward and backward of each op on each working backend, float32 against float64."""
    threads = torch.get_num_threads()
    # For small problems on a busy machine, starting threads costs most of the time.
    torch.set_num_threads(1)
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    try:
        return [line for case in _cases() for line in _check_case(case, devices)]
    finally:
        torch.set_num_threads(threads)


def _check_case(case: Case, devices: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    solution = None
    for device in devices:
        problem = providers.Problem.make(case, torch.float32, device, seed=1, grad=True)
        grads = check.upstream(problem, seed=2)
        solution = solution or exact.solve(problem, grads)
        for provider in providers.ours(case.op):
            try:
                found = check.compute(problem, provider.prepare(problem), grads)
            except providers.Unsupported:
                continue  # `backends` reports the reason
            except Exception as error:  # report a crash as the result
                yield _line(
                    problem, provider.name, "failed", None, f"{type(error).__name__}: {error}"
                )
                continue
            verdict = check.judge(problem, found, solution, peer=False)
            yield _line(
                problem,
                provider.name,
                "wrong" if verdict.wrong else "ok",
                verdict.bound_used,
                verdict.wrong,
            )


def _line(
    problem: providers.Problem, backend: str, verdict: str, used: float | None, detail: str | None
) -> dict[str, Any]:
    return {
        "op": problem.case.op, "case": problem.case.name, "device": problem.device,
        "backend": backend, "verdict": verdict,
        "bound_used": used if used is not None and math.isfinite(used) else None, "detail": detail,
    }  # fmt: skip


# ---- text output


def show(console: Console, report: dict[str, Any]) -> None:
    def facts(title: str, pairs: list[tuple[str, object]]) -> None:
        console.heading(title)
        for name, value in pairs:
            if value not in (None, "", []):
                console.print(f"  {name:<14} {clean_list(value)}")

    here, cpu_, native_, gpu_ = (
        report["installation"],
        report["cpu"],
        report["native"],
        report["gpu"],
    )
    facts("Installation", [
        ("pytransformer", " at ".join(filter(None, (here["pytransformer"], here["commit"])))),
        ("in", here["path"]), ("Python", here["python"]), ("torch", here["torch"]),
        ("Triton", here["triton"] or "not installed"), ("system", here["system"]),
    ])  # fmt: skip
    facts("CPU", [
        ("name", cpu_["name"]),
        ("cores", f"{cpu_['cores']} usable; torch uses {cpu_['threads']} threads"),
        ("has", cpu_["features"]), ("has not", cpu_["features_absent"]),
    ])  # fmt: skip
    facts("Native CPU library", [
        ("loaded", "yes" if native_["loaded"] else f"no: {native_['why_not']}"),
        ("costs", native_["costs"]), ("in use", native_["isa"]),
        ("asked for", native_["isa_asked_for"]),
        ("built for", native_["isas_built"]), ("runs here", native_["isas_usable"]),
        ("not built", [f"{name}: {why}" for name, why in native_["isas_not_built"].items()]),
        ("note", native_["note"]),
        ("compiler", native_["compiler"]),
        ("eager calls", fast_path_told(native_["fast_path_why_not"])),
    ])  # fmt: skip
    cuda_ = report["cuda"]
    built_for = f"not built: {cuda_['reason']}"
    if cuda_["built"]:
        built_for = f"{', '.join(cuda_['archs'])} with nvcc {cuda_['nvcc']}"
    runs = "yes" if cuda_["why_not"] is None else f"no: {cuda_['why_not']}"
    facts("CUDA library", [
        ("built for", built_for), ("loaded", "yes" if cuda_["loaded"] else None),
        ("holds", cuda_["ops"]), ("runs here", runs if cuda_["loaded"] else None),
    ])  # fmt: skip
    facts("GPU", [("found", gpu_["devices"]), ("none", gpu_["why_not"])])

    console.heading("Backends")
    rows = []
    for backend in report["backends"]:
        does = [", ".join(backend["works"])] if backend["works"] else []
        refuses = [
            ("not " + ", ".join(r["ops"]) + ": " if does else "") + r["reason"]
            for r in backend["why_not"]
        ]
        rows.append((backend["backend"], "works" if does else "no", "; ".join(does + refuses)))
    console.table(("backend", "", "ops, or why not"), rows)

    for of_device in report["verification"]:
        show_verification(console, of_device)

    console.heading("Optional libraries")
    console.table(
        ("library", "version", "for"),
        [(n, o["version"] or "not installed", o["for"]) for n, o in report["optional"].items()],
    )

    console.heading("Self-check: forward and backward against float64")
    lines = report["self_check"]
    verdicts = []
    for line in lines:
        shown = "ok" if line["verdict"] == "ok" else line["verdict"].upper()
        figure = line["detail"] or f"{100 * line['bound_used']:.0f} %"
        verdicts.append((line["op"], line["case"], line["device"], line["backend"], shown, figure))
    console.table(("op", "case", "device", "backend", "", "share of the error bound"), verdicts)
    bad = sum(line["verdict"] != "ok" for line in lines)
    backends = ", ".join(dict.fromkeys(line["backend"] for line in lines))
    console.print(
        f"{bad} of {len(lines)} checks failed."
        if bad
        else f"All {len(lines)} checks passed ({backends})."
    )


def show_verification(console: Console, results: dict[str, Any]) -> None:
    console.heading(f"Verification on {results['device']} (PYTRANSFORMER_VERIFY={results['mode']})")
    if not results["rows"]:
        console.print(
            "  no results: `pytransformer verify` checks and times every backend; "
            "until then kernels for GPUs are checked at first use"
        )
        return
    rows = []
    for row in results["rows"]:
        shown = "; ".join(row["bad"]) or (
            f"{row['not checked']} not checked" if row["not checked"] else ""
        )
        state = "WRONG" if row["bad"] else "right"
        rows.append((row["op"], row["backend"], row["dtype"], state, row["right"], shown))
    if results["shipped"]:
        console.print("  results of our own run on this architecture are used")
    if results["written"]:
        console.print(f"  written {results['written']}")
    console.table(("op", "backend", "dtype", "", "right", "details"), rows)
    for op, order in results["order"].items():
        console.print(f"  {op} tries {', then '.join(order)}: as measured")


def fast_path_told(why_not: str | None) -> str:
    return (
        "by the C++ fast path"
        if why_not is None
        else f"by Python, as the C++ fast path is {why_not}"
    )


def clean_list(value: object) -> str:
    return clean(", ".join(map(str, value)) if isinstance(value, list) else value)
