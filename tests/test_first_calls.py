"""MKL's vector functions are accurate from the first call on: pytransformer._first_calls has made it."""

from __future__ import annotations

import json
import mmap
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pytransformer._first_calls import FUNCTIONS

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this PyTorch is built without MKL")


def fresh(code: str) -> Any:
    """What `code` prints as JSON in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_mkl
def test_the_import_calls_every_function_with_one_number_of_either_type() -> None:
    calls = fresh("""
import json, torch
from torch.utils._python_dispatch import TorchDispatchMode
class Record(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            number = args[0]
            calls.append([function.overloadpacket.__name__, str(number.dtype), str(number.device), number.numel()])
        return function(*args, **(kwargs or {}))
calls = []
with Record():
    import pytransformer
print(json.dumps(calls))
""")
    wanted = [[f.__name__, str(t), "cpu", 1] for t in (torch.float32, torch.float64) for f in FUNCTIONS]
    assert sorted(calls) == sorted(wanted)


@needs_mkl
def test_no_function_of_this_pytorch_is_missing() -> None:
    """MKL is linked into PyTorch's library function by function; vms is a vector, single precision, of the accuracy asked for."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        names = {name.decode().lower() for name in re.findall(rb"\0vms([A-Z][A-Za-z0-9]+)(?=\0)", data)}
    if not names:
        pytest.skip("this PyTorch finds MKL in a library of its own")
    assert {"log" if name == "ln" else name for name in names} <= {function.__name__ for function in FUNCTIONS}


@needs_mkl
@pytest.mark.slow
def test_the_first_result_of_a_process_is_that_of_the_second() -> None:
    """Of 100 processes, three side by side; without the calls at import 11 of 350 had another first result on two cores."""
    code = """
import json, torch, pytransformer as pt
x = torch.randn(2, 4, 64, 32, requires_grad=True)
first = pt.attention(x, x, x, causal="top_left", backend="reference")
second = pt.reference.attention(x.detach(), x.detach(), x.detach(), causal="top_left")
print(json.dumps((first - second).abs().max().item()))
"""
    with ThreadPoolExecutor(3) as pool:
        apart = list(pool.map(fresh, [code] * 100))
    assert max(apart) == 0
