# SPDX-License-Identifier: Apache-2.0
"""Plant each fault of fast_path_faults.py in a copy of the C++ fast path; a test must fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from support.paths import needs_fast_path

sys.path.append(str(Path(__file__).parent))
import fast_path_faults

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
slow = pytest.mark.slow  # compiles the fast path and starts a process per fault
FUZZ, FAST_PATH, WATCHED, NODES, ERRORS, DECODE = (
    f"tests/ops/test_fast_path{name}.py"
    for name in ("_fuzz", "", "_watched", "_nodes", "_errors", "_decode")
)
LINEAR = "tests/nn/test_linear.py"
# The test that detects each fault.
FAULTS = {
    "watchers_ignored": (WATCHED, "watched_call"),
    "modes_ignored": (WATCHED, "watched_call"),
    "function_modes_ignored": (WATCHED, "watched_call"),
    "profiler_ignored": (WATCHED, "watched_call"),
    "traces_forgotten": (WATCHED, "traces_and_observers"),
    "subclasses_taken": (WATCHED, "subclasses_views"),
    "any_keys_taken": (WATCHED, "subclasses_views"),
    "tangents_lost": (FAST_PATH, "tangent"),
    "any_gradient_taken": (FAST_PATH, "tangent"),
    "second_derivative_lost": (FAST_PATH, "second_derivatives"),
    "numbers_not_compiled_for": (FAST_PATH, "other_numbers"),
    "order_of_terms_lost": (FAST_PATH, "memory_order"),
    "order_of_query_lost": (FUZZ, "random_problems and attention"),
    "gradient_read_as_it_lies": (FUZZ, "random_problems and attention"),
    "gradient_of_lse_lost": (FUZZ, "random_problems and attention"),
    "sides_swapped": (FUZZ, "random_problems and attention"),
    "global_keys_lost": (FUZZ, "random_problems and attention"),
    "always_top_left": (FUZZ, "random_problems and attention"),
    "lengths_exchanged": (FUZZ, "random_problems and attention"),
    "scale_of_values": (FUZZ, "random_problems and attention"),
    "dimensions_behind": (FUZZ, "random_problems and attention"),
    "sinks_lost": (FUZZ, "random_problems and attention"),
    "first_outputs_saved": (FUZZ, "random_problems and layer_norm"),
    "gradient_of_stream_lost": (FUZZ, "random_problems and layer_norm"),
    "eps_of_x": (NODES, "add_norm_by_outputs"),
    "rows_read_as_they_lie": (FUZZ, "random_problems and feed_forward"),
    "scratch_shared": (FUZZ, "random_problems and feed_forward"),
    "not_recomputed": (FUZZ, "random_problems and feed_forward"),
    "mean_as_sum": (FUZZ, "random_problems and cross_entropy"),
    "ignored_counted": (FUZZ, "random_problems and cross_entropy"),
    "seed_not_drawn": (NODES, "a_seed_drops_the_same"),
    "autocast_ignored": (WATCHED, "autocast"),
    "places_not_checked": (ERRORS, "append_kv"),
    "gradients_lost": (ERRORS, "append_kv"),
    "version_kept": (DECODE, "autograd_notices"),
    "linear_without_gradient": (LINEAR, "gradients"),
    "many_rows_taken": (LINEAR, "gradients"),
    "any_bias_taken": (LINEAR, "bad_input"),
    "nan_taken": (ERRORS, "attention"),
    "negative_taken": (ERRORS, "attention"),
}


def test_every_fault_has_a_test() -> None:
    """Each faulty text occurs once in its file."""
    assert {
        name
        for _, _, faulty in fast_path_faults.FAULTS
        for name in re.findall(r"PT_FAULT\((\w+)\)", faulty)
    } == set(FAULTS)
    assert {
        (file, text): count
        for file, text, _ in fast_path_faults.FAULTS
        if (count := source(file).count(text)) != 1
    } == {}


def source(file: str) -> str:
    return (CSRC / "fast_path" / file).read_text()


FLAGS = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[1])
import fast_path_build
place = pathlib.Path(sys.argv[2])
print(json.dumps([fast_path_build.compile_flags(place), fast_path_build.link_flags(place)]))
"""


@pytest.fixture(scope="module")
def faulty_fast_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a fast path with all faults."""
    folder = tmp_path_factory.mktemp("fast_path")
    shutil.copytree(CSRC / "common", folder / "common")
    texts = {
        path.name: path.read_text() for path in (CSRC / "fast_path").iterdir() if path.is_file()
    }
    for file, text, faulty in fast_path_faults.FAULTS:
        texts[file] = texts[file].replace(text, faulty)
    for file, text in texts.items():
        (folder / "fast_path" / file).parent.mkdir(exist_ok=True)
        (folder / "fast_path" / file).write_text(text)
    asked = [sys.executable, "-c", FLAGS, str(CSRC), str(Path(torch.__file__).parent)]
    to_compile, to_link = json.loads(
        subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    )
    compiler = [
        *os.environ.get("CXX", "g++").split(),
        "-fPIC",
        "-include",
        "emulator/fault.h",
        "-I",
        str(folder),
        "-I",
        str(CSRC),
    ]
    flags = [*to_compile, "-O0", "-w"]
    sources = {
        "unit.o": folder / "fast_path" / "unit.cpp",
        "fault.o": CSRC / "emulator" / "fault.cpp",
    }
    for name, source in sources.items():
        subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(folder / name)], check=True)
    objects = [str(folder / name) for name in sources]
    library = folder / f"_fast_path{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([*compiler, "-shared", *objects, *to_link, "-o", str(library)], check=True)
    return library


# Run before pytest: the package then loads this fast path instead of its own.
RUN = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("pytransformer._fast_path", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["pytransformer._fast_path"] = module
spec.loader.exec_module(module)
import pytest
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def outcome(library: Path, fault: str, file: str, chosen: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, str(library), file, "-k", chosen]
    environment = os.environ | {"PYTRANSFORMER_FAULT": fault}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@slow
@needs_fast_path
@pytest.mark.parametrize(("file", "chosen"), sorted(set(FAULTS.values())))
def test_tests_pass_without_a_fault(file: str, chosen: str, faulty_fast_path: Path) -> None:
    done = outcome(faulty_fast_path, "", file, chosen)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@slow
@needs_fast_path
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_detected(fault: str, faulty_fast_path: Path) -> None:
    done = outcome(faulty_fast_path, fault, *FAULTS[fault])
    assert done.returncode == 1 and "failed" in done.stdout, (
        done.stdout[-2000:] + done.stderr[-2000:]
    )
