# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a training step of each model and variant, in a fresh process.

A helper process builds the models and then forks one child per measurement. Building happens once,
and no variant's allocations hide those of the next. Linux only, like `cli.benchmark.memory`, which
measures the peaks.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from pytransformer.cli.benchmark.memory import ENVIRONMENT, measure_rise, why_not
from pytransformer.cli.benchmark.memory import Unmeasured as Unmeasured


def peaks(requests: Sequence[tuple[str, str]], source: str) -> dict[tuple[str, str], int]:
    """Return the rise of resident memory at its peak, in bytes, per (subject, variant).

    ``source`` names the module whose ``build(name)`` creates the subjects.

    Raises:
        Unmeasured: this system cannot measure it, or the helper failed; the message has the reason.
    """
    if (reason := why_not()) is not None:
        raise Unmeasured(reason)
    import torch

    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from support.model_memory import serve; serve()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(
            {"requests": requests, "source": source, "threads": torch.get_num_threads()}
        ),
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    if answer.returncode:
        raise Unmeasured(f"the helper process failed: {answer.stderr.strip().splitlines()[-1:]}")
    return dict(zip(requests, json.loads(answer.stdout), strict=True))


def serve() -> None:
    """Run the helper: read one line of JSON, write a list of bytes."""
    import torch

    asked = json.load(sys.stdin)
    build = importlib.import_module(asked["source"]).build
    torch.set_num_threads(1)  # a fork needs a process without threads
    subjects = {name: build(name) for name in dict.fromkeys(name for name, _ in asked["requests"])}
    found = []
    for name, variant in asked["requests"]:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            torch.set_num_threads(asked["threads"])
            subject = subjects[name]
            subject.model.train()
            with subject.select(variant), torch.random.fork_rng():
                rise = measure_rise(subject.trained)
            os.write(send, str(rise).encode())
            os._exit(0)
        os.close(send)
        with open(receive) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        if not text:
            sys.exit(f"{name}, {variant}: the measured process died")
        found.append(int(text))
    print(json.dumps(found))
