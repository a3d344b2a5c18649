# SPDX-License-Identifier: Apache-2.0
"""The helper process of :mod:`memory`: imports all before its first fork, without threads."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from pytransformer.cli.benchmark import runner
from pytransformer.cli.benchmark.memory import measure_rise


def serve() -> None:
    """Run the helper's loop: read one line of JSON, fork one child, write one line of JSON."""
    answers = os.dup(1)  # keep output of the measured code away from the answers
    os.dup2(2, 1)
    for line in sys.stdin:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receive)
            try:
                answer: dict[str, Any] = {"bytes": _measure_here(json.loads(line))}
            except BaseException as error:  # reported to the parent, which decides
                answer = {"error": f"{type(error).__name__}: {error}"}
            os.write(send, json.dumps(answer).encode())
            os._exit(0)
        os.close(send)
        with open(receive) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        if not text:
            text = json.dumps(
                {"error": f"the measured process died with signal {os.WTERMSIG(status)}"}
            )
        os.write(answers, (text + "\n").encode())


def _measure_here(request: dict[str, Any]) -> int:
    tiny, call = runner.memory_calls(request)
    tiny()
    if request["device"] == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return measure_rise(call)
