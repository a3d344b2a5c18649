# SPDX-License-Identifier: Apache-2.0
"""``pt.verify`` checks and times every backend on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from .ops._core import verification


def verify(
    *,
    ops: Sequence[str] = (),
    backends: Sequence[str] = (),
    devices: Sequence[str] = (),
    seconds: float | None = None,
) -> list[dict[str, Any]]:
    """Check every backend on this machine against float64, and time the correct backends.

    The checks run in a child process. The call stores the results in the user's cache directory.
    Every later call of an op uses them, in this process too. ``pytransformer verify`` does the
    same.

    Args:
        ops, backends: names; by default all.
        devices: ``"cpu"`` or ``"cuda"``; by default the CPU and the GPU if there is one.
        seconds: time per device; by default 120, and more on a slow or busy machine. The next call
            runs the remaining checks.

    Returns:
        One object per device: ``checks`` (op, backend, dtype, case, outcome, detail), ``order``,
            ``times``, ``key``, ``path``.

    Raises:
        ValueError: an op, backend or device is unknown.
        RuntimeError: the child process ended without a result.
    """
    words = [
        w
        for name, values in (("op", ops), ("backend", backends), ("device", devices))
        for v in values
        for w in (f"--{name}", v)
    ]
    words += [] if seconds is None else ["--seconds", str(seconds)]
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from pytransformer.cli import main;"
        " sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "verify", "--json", *words]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=None, text=True, env=dict(os.environ), check=False
    )
    verification.forget()
    if done.returncode == 2:
        raise ValueError(
            f"verify: {' '.join(words)} was not understood; what is wrong is on stderr"
        )
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(
            f"verify: the process that checks ended with code {done.returncode} and without a"
            " result"
        ) from None
