# SPDX-License-Identifier: Apache-2.0
"""Faults in the C++ lane, each found by a test of the lane, in a process of its own: a copy of the lane has them all (lane_faults.py)."""

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

from pytransformer.testing.lanes import needs_lane

sys.path.append(str(Path(__file__).parent))
import lane_faults

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
slow = pytest.mark.slow  # compiles the lane again, and starts a process for each fault
FUZZ, LANE, WATCHED, NODES, ERRORS, DECODE = (
    f"tests/ops/test_lane{name}.py" for name in ("_fuzz", "", "_watched", "_nodes", "_errors", "_decode")
)
LINEAR = "tests/nn/test_linear.py"
# Of each fault the test that finds it.
FAULTS = {
    "watchers_ignored": (WATCHED, "watched_call"),
    "modes_ignored": (WATCHED, "watched_call"),
    "function_modes_ignored": (WATCHED, "watched_call"),
    "profiler_ignored": (WATCHED, "watched_call"),
    "traces_forgotten": (WATCHED, "traces_and_observers"),
    "subclasses_taken": (WATCHED, "subclasses_views"),
    "any_keys_taken": (WATCHED, "subclasses_views"),
    "tangents_lost": (LANE, "tangent"),
    "any_gradient_taken": (LANE, "tangent"),
    "second_derivative_lost": (LANE, "second_derivatives"),
    "numbers_not_compiled_for": (LANE, "other_numbers"),
    "order_of_terms_lost": (LANE, "memory_order"),
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


def test_every_fault_of_the_lane_is_here() -> None:
    """And each text occurs once in its file."""
    assert {name for _, _, faulty in lane_faults.FAULTS for name in re.findall(r"PT_FAULT\((\w+)\)", faulty)} == set(FAULTS)
    assert {(file, text): count for file, text, _ in lane_faults.FAULTS if (count := source(file).count(text)) != 1} == {}


def source(file: str) -> str:
    return (CSRC / "lane" / file).read_text()


FLAGS = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[1])
import lane_build
place = pathlib.Path(sys.argv[2])
print(json.dumps([lane_build.compile_flags(place), lane_build.link_flags(place)]))
"""


@pytest.fixture(scope="module")
def faulty_lane(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lane that has all faults."""
    folder = tmp_path_factory.mktemp("lane")
    shutil.copytree(CSRC / "common", folder / "common")
    texts = {path.name: path.read_text() for path in (CSRC / "lane").iterdir() if path.is_file()}
    for file, text, faulty in lane_faults.FAULTS:
        texts[file] = texts[file].replace(text, faulty)
    for file, text in texts.items():
        (folder / "lane" / file).parent.mkdir(exist_ok=True)
        (folder / "lane" / file).write_text(text)
    asked = [sys.executable, "-c", FLAGS, str(CSRC), str(Path(torch.__file__).parent)]
    to_compile, to_link = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
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
    sources = {"unit.o": folder / "lane" / "unit.cpp", "fault.o": CSRC / "emulator" / "fault.cpp"}
    for name, source in sources.items():
        subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(folder / name)], check=True)
    objects = [str(folder / name) for name in sources]
    library = folder / f"_lane{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([*compiler, "-shared", *objects, *to_link, "-o", str(library)], check=True)
    return library


# Stands before pytest: the package finds this lane where it would load its own.
RUN = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("pytransformer._lane", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["pytransformer._lane"] = module
spec.loader.exec_module(module)
import pytest
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def outcome(library: Path, fault: str, file: str, chosen: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, str(library), file, "-k", chosen]
    environment = os.environ | {"PYTRANSFORMER_FAULT": fault}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)


@slow
@needs_lane
@pytest.mark.parametrize(("file", "chosen"), sorted(set(FAULTS.values())))
def test_without_a_fault_all_is_well(file: str, chosen: str, faulty_lane: Path) -> None:
    done = outcome(faulty_lane, "", file, chosen)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@slow
@needs_lane
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, faulty_lane: Path) -> None:
    done = outcome(faulty_lane, fault, *FAULTS[fault])
    assert done.returncode == 1 and "failed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
