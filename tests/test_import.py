# SPDX-License-Identifier: Apache-2.0
"""Importing the package is cheap, never fails, and changes only MKL's kernel selection.

Each check runs in a fresh interpreter, because this one has already imported everything.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import pytransformer
from pytransformer._first_calls import FUNCTIONS

PACKAGE = Path(pytransformer.__file__).resolve().parent
ROOT = Path(__file__).resolve().parent.parent


def fresh(
    code: str, path: Path | None = None, cwd: Path | None = None, timeout: float = 120
) -> Any:
    """Run `code` in a new interpreter and return the JSON in its last line of output.

    `path` comes first on sys.path.
    """
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(path), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_overrides_no_torch_op() -> None:
    """The dispatch tables of all torch ops and the public functions are unchanged."""
    changed = fresh("""
        import json, torch, warnings
        import torch.nn.functional as F
        def state():
            names = torch._C._dispatch_get_all_op_names()
            names = [n for n in names if not n.startswith("pytransformer")]
            tables = {n: torch._C._dispatch_dump(n) for n in names}
            return tables | {
                "sdpa": id(F.scaled_dot_product_attention),
                "layer_norm": id(F.layer_norm),
                "threads": torch.get_num_threads(),
                "dtype": str(torch.get_default_dtype()),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "warnings": len(warnings.filters),
                "modes": torch.overrides._len_torch_function_stack(),
            }
        before = state()
        import pytransformer
        after = state()
        names = sorted(before.keys() | after.keys())
        print(json.dumps([name for name in names if before.get(name) != after.get(name)]))
    """)
    assert changed == []


def test_import_touches_no_gpu_and_loads_nothing_heavy() -> None:
    loaded, cuda = fresh("""
        import json, sys, torch
        import torch.utils.flop_counter  # which loads Triton where it is installed
        before = set(sys.modules)
        import pytransformer
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        heavy = {
            "triton", "transformers", "timm", "matplotlib", "pandas", "tokenizers",
            "safetensors", "kernels",
        }
        print(json.dumps([sorted(new & heavy), torch.cuda.is_initialized()]))
    """)
    assert loaded == []
    assert not cuda


def test_subpackages_load_on_first_use() -> None:
    """Naming one on the package loads it, without `import pytransformer.models`.

    The rules of `convert` load `nn` early.
    """
    loaded, listed, used, unknown = fresh("""
        import json, sys, pytransformer as pt
        names = ["models", "nn", "training", "viz"]
        late = [["pytransformer", name] for name in names if name != "nn"]
        loaded = [name for name in sys.modules if name.split(".")[:2] in late]
        listed = [name in dir(pt) for name in names]
        used = [getattr(pt, name) is sys.modules["pytransformer." + name] for name in names]
        models = __import__("pytransformer.models", fromlist=["x"])
        used.append(pt.models.Transformer is models.Transformer)
        try:
            pt.modles
        except AttributeError as error:
            unknown = str(error)
        print(json.dumps([loaded, listed, used, unknown]))
    """)
    assert loaded == []
    assert listed == [True] * 4 and used == [True] * 5
    assert unknown == "module 'pytransformer' has no attribute 'modles'"


def test_import_does_not_load_the_native_library() -> None:
    """The first call that may use it loads it, so that a broken library cannot break the import."""
    maps = fresh("""
        import json, pytransformer
        from pathlib import Path
        print(json.dumps(["libpytransformer" in Path("/proc/self/maps").read_text()]))
    """)
    assert maps == [False]


def test_import_time() -> None:
    """The limit is relative to torch's import in the same process; the best of three counts."""
    ratios = [
        fresh("""
            import json, time
            start = time.perf_counter()
            import torch
            middle = time.perf_counter()
            import pytransformer
            print(json.dumps((time.perf_counter() - middle) / (middle - start)))
        """)
        for _ in range(3)
    ]
    assert min(ratios) < 0.5, ratios


def test_library_that_does_not_load_gives_a_reason(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(PACKAGE, tmp_path / "pytransformer", ignore=ignore)
    (tmp_path / "pytransformer" / "libpytransformer_cpu.so").write_bytes(b"not a library")
    origin, backend, reason = fresh(
        """
        import json, torch, pytransformer as pt
        x = torch.ones(1, 1, 4, 8)
        explanation = pt.explain("attention", x, x, x)
        pt.attention(x, x, x)
        print(json.dumps([pt.__file__, explanation.backend, explanation.reasons["cpu"]]))
        """,
        path=tmp_path,
    )
    assert Path(origin).is_relative_to(tmp_path)
    assert backend == "torch"
    assert "does not load" in reason


@pytest.mark.skipif(
    str(ROOT) in os.environ.get("PYTHONPATH", "").split(os.pathsep),
    reason="PYTHONPATH names the checkout, so the name is found",
)
def test_kernels_is_not_a_top_level_name() -> None:
    """The name belongs to another package, which transformers imports when it is installed."""

    def ours(origin: str | None) -> bool:
        return origin is not None and Path(origin).resolve().is_relative_to(ROOT)

    spec = importlib.util.find_spec("kernels")
    assert spec is None or not ours(spec.origin)
    origin = fresh(
        """
        import importlib.util, json, pytransformer
        spec = importlib.util.find_spec("kernels")
        print(json.dumps(spec and spec.origin))
        """,
        cwd=ROOT,
    )
    assert not ours(origin)


def test_fork_after_import_and_after_use() -> None:
    """Forked workers can call the ops, with one thread as in torch's data loader."""
    codes = fresh("""
        import json, os, torch, pytransformer as pt
        x = torch.randn(2, 2, 96, 32)
        def child():
            pid = os.fork()
            if pid == 0:
                torch.set_num_threads(1)
                out, expected = pt.attention(x, x, x), pt.reference.attention(x, x, x)
                os._exit(0 if torch.allclose(out, expected, atol=1e-5) else 1)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        unused = child()
        pt.attention(x, x, x)
        print(json.dumps([unused, child()]))
        """)
    assert codes == [0, 0]


# ---- the import makes MKL's vector functions accurate from the first call on

needs_mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="this PyTorch is built without MKL"
)


@needs_mkl
def test_import_calls_every_vector_function_once_per_dtype() -> None:
    calls = fresh("""
import json, torch
from torch.utils._python_dispatch import TorchDispatchMode
class Record(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            number = args[0]
            name = function.overloadpacket.__name__
            calls.append([name, str(number.dtype), str(number.device), number.numel()])
        return function(*args, **(kwargs or {}))
calls = []
with Record():
    import pytransformer
print(json.dumps(calls))
""")
    expected = [
        [f.__name__, str(t), "cpu", 1] for t in (torch.float32, torch.float64) for f in FUNCTIONS
    ]
    assert sorted(calls) == sorted(expected)


@needs_mkl
def test_every_vector_function_of_pytorch_is_called() -> None:
    """PyTorch links MKL by function; vms is a single-precision vector function with an accuracy."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        names = {
            name.decode().lower() for name in re.findall(rb"\0vms([A-Z][A-Za-z0-9]+)(?=\0)", data)
        }
    if not names:
        pytest.skip("MKL is a library of its own here, which does not say what PyTorch calls of it")
    assert {"log" if name == "ln" else name for name in names} <= {
        function.__name__ for function in FUNCTIONS
    }


@needs_mkl
@pytest.mark.slow
def test_first_result_of_a_process_equals_the_second() -> None:
    """Run 100 processes, three side by side.

    Without the calls at import, 11 of 350 had another first result on two cores.
    """
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


def test_recorded_calls_import_no_compiler() -> None:
    """A GPU's second call is recorded; importing torch._dynamo took most of 4.3 s on an H100."""
    imported = fresh("""
        import json, sys, torch
        from pytransformer.ops._core.fast_path import Recorder
        Recorder.precision = lambda self: (0,)
        with Recorder() as recorder:
            torch.zeros(2)[:, None] + 1
        assert recorder.events
        print(json.dumps([name for name in ("torch._dynamo", "sympy") if name in sys.modules]))
    """)
    assert imported == []


def test_package_works_without_native_parts_and_posix_modules(tmp_path: Path) -> None:
    """The reference and models work, as on Windows and macOS; activate() changes nothing."""
    left_out = shutil.ignore_patterns("*.so", "__pycache__", "kernels")
    shutil.copytree(PACKAGE, tmp_path / "pytransformer", ignore=left_out, symlinks=True)
    result = fresh(
        """
        import json, sys, warnings
        for name in ("fcntl", "resource", "pwd", "grp", "termios", "triton"):
            sys.modules[name] = None  # an import of it fails
        warnings.simplefilter("ignore")
        import torch
        import pytransformer as pt
        from pytransformer import nn, training, viz
        from pytransformer.models import GPT, GPTConfig, generate

        q = torch.randn(1, 2, 8, 16, requires_grad=True)
        pt.attention(q, q, q, causal="top_left").sum().backward()
        model = GPT(GPTConfig(vocab_size=11, d_model=16, num_layers=1, num_heads=2))
        ids = torch.randint(11, (1, 5))
        model(ids, labels=ids).loss.backward()
        tokens = generate(model.eval(), ids, max_new_tokens=3).lists()
        plain = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        with pt.activate():
            same = torch.equal(torch.nn.functional.scaled_dot_product_attention(q, q, q), plain)
        finite = bool(q.grad.isfinite().all())
        print(json.dumps([pt.explain("attention", q, q, q).backend, finite, len(tokens[0]), same]))
        """,
        path=tmp_path,
    )
    assert result == ["torch", True, 3, True]
