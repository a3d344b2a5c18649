# SPDX-License-Identifier: Apache-2.0
"""Test one op and, if the tests pass, time it.

    python bench/tools/test_then_time.py attention                        # make try OP=attention
    python bench/tools/test_then_time.py add_norm --shape rows=8192,d=1024 --dtype bf16

Further arguments go to `pytransformer bench`. The tests are those of the op's family in tests/ops
and its fuzzer, with fewer cases than in `make test`. The exit code is that of the first failing
step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pytransformer.ops._core.registry import OPS
from pytransformer.testing import kits

ROOT = Path(__file__).resolve().parents[2]
# Like tests/run_parts.py, remove the empty path, which would expose kernels/.
PYTEST = (
    "import sys; sys.path = [p for p in sys.path if p]; import pytest;"
    " sys.exit(pytest.main(sys.argv[1:]))"
)
FUZZ_CASES = 300


def family_of(op: str) -> str:
    """Return the op's family."""
    for name, spec in OPS.items():
        if op in (name, spec.family):
            return spec.family
    raise SystemExit(f"test_then_time: no op {op!r}; there are {', '.join(kits.ops())}")


def commands(op: str, more: list[str]) -> list[list[str]]:
    """Return the command of each step, in order."""
    family = family_of(op)
    ops = [op] if op in kits.ops() else [name for name in kits.ops() if OPS[name].family == family]
    tests = sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "ops").glob(f"test_{family}*.py")
    )
    fuzz = [
        *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").glob("test_fuzz*.py"))),
        "-k",
        family,
    ]
    pytest = [
        sys.executable,
        "-c",
        PYTEST,
        "-q",
        "-m",
        "not slow and not gpu",
        f"--fuzz-cases={FUZZ_CASES}",
    ]
    return [
        [*pytest, *tests],
        [*pytest, *fuzz],
        [sys.executable, "-m", "pytransformer", "bench", *ops, *more],
    ]


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    for command in commands(sys.argv[1], sys.argv[2:]):
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONSAFEPATH": "1"}
        ).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
