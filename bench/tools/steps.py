# SPDX-License-Identifier: Apache-2.0
"""Run benchmarks one after the other, each in a fork of one process.

    python bench/tools/steps.py FILE --seconds 300 --out FOLDER

The parent imports everything once, because on a rented GPU imports cost more than the timings. A
line of FILE is a step: NAME SECONDS [VARIABLE=VALUE ...] and the arguments of `pytransformer
bench`. A step that crashes, hangs or corrupts the GPU's context affects no other step. FOLDER gets
a folder of results per step and a log; the tool prints a short table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from pytransformer.cli import main as pytransformer
from pytransformer.cli.benchmark import command  # noqa: F401  (imported before the forks)

LEAST = 5.0  # min seconds: a step with less time left does not start
SHOWN = 600  # characters of the log of a step without results


def run(name: str, arguments: list[str], out: Path) -> NoReturn:
    """Run the step in this process."""
    os.setpgrp()
    sys.stdout = sys.stderr = (out / f"{name}.log").open("w", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    code = 1
    while re.fullmatch(r"[A-Z_0-9]+=.*", arguments[0]):
        variable, _, value = arguments.pop(0).partition("=")
        os.environ[variable] = value
    try:
        code = pytransformer(["bench", *arguments, "--out", str(out / name)])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def waited_for(process: int, seconds: float) -> str:
    """Return the process's exit code as text, or that it was stopped."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return f"exit code {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "stopped"


def table(folder: Path, log: Path) -> list[str]:
    """Return, by case and mode, milliseconds per call, with kernel time in parentheses."""
    results = folder / "results.json"
    if not results.exists():
        return [log.read_text(errors="replace")[-SHOWN:].strip()]
    document = json.loads(results.read_text())
    lines: dict[tuple[str, str, str], list[str]] = {}
    for row in document["rows"]:
        kernels = f" ({row['kernel_ms']:.3f})" if row["kernel_ms"] else ""
        cells = lines.setdefault((row["op"], row["case"], row["mode"]), [])
        cells.append(
            f"{row['backend']} {row['median_ms']:.3f}{kernels} ms, {row['tflops']:.0f} TFLOP/s,"
            f" {row['gbps']:.0f} GB/s"
        )
    told = [f"  {' '.join(key)}: {'; '.join(cells)}" for key, cells in lines.items()]
    return told + [
        f"  {n['case']} {n['mode']} {n['backend']}: {n['status']}, {n['reason'][:120]}"
        for n in document["not_run"]
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="for all steps (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + options.seconds, False
    for line in options.file.read_text().splitlines():
        name, seconds, *arguments = shlex.split(line)
        limit = min(float(seconds), end - time.monotonic())
        if limit < LEAST:
            print(f"{name}: left out, no time", flush=True)
            continue
        start = time.monotonic()
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            run(name, arguments, options.out)
        how = waited_for(process, limit)
        failed |= how != "exit code 0"
        print(f"{name}: {how} after {time.monotonic() - start:.1f} s", flush=True)
        print(*table(options.out / name, options.out / f"{name}.log"), sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
