# SPDX-License-Identifier: Apache-2.0
"""Libraries linked for manylinux_2_28 need no newer symbols; the replacements are equivalent."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
# glibc functions whose newest version came after 2.28 (dlsym, pthread_create: 2.34; pow: 2.29),
# __libc_single_threaded (shared_ptr), and symbols of libstdc++ 9 to 12 (stringstream's constructor,
# the throw of a bad array length).
SOURCE = """
#include <cmath>
#include <dlfcn.h>
#include <memory>
#include <new>
#include <pthread.h>
#include <sstream>
static void* doubled(void* p) { *static_cast<double*>(p) *= 2; return p; }
extern "C" double power_in_a_thread(double base, double exponent) {
  auto held = std::make_shared<double>(std::pow(base, exponent));
  auto copy = held;
  pthread_t thread;
  if (pthread_create(&thread, nullptr, doubled, copy.get())) return -1;
  if (pthread_join(thread, nullptr)) return -1;
  std::stringstream text;
  text << *held;
  return dlsym(RTLD_DEFAULT, "malloc") ? std::stod(text.str()) : -2;
}
extern "C" int bad_length(long n) {
  try { std::allocator<double> a; a.deallocate(a.allocate(n), n); return 0; }
  catch (const std::bad_array_new_length&) { return -1; }
}
"""
RUN = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.power_in_a_thread.restype = ctypes.c_double
library.power_in_a_thread.argtypes = [ctypes.c_double] * 2
library.bad_length.argtypes = [ctypes.c_long]
print(library.power_in_a_thread(3.0, 4.0), library.bad_length(2**62), library.bad_length(8))
"""


@pytest.fixture
def manylinux(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if platform.machine() != "x86_64" or not shutil.which("g++"):
        pytest.skip("the wheels' platform is x86_64 Linux, and g++ links them")
    spec = importlib.util.spec_from_file_location("manylinux", CSRC / "manylinux.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "source.cpp").write_text(SOURCE)
    subprocess.run(["g++", "-O2", "-fPIC", "-c", "source.cpp"], cwd=tmp_path, check=True)
    return ["g++", "-shared", str(tmp_path / "source.o"), "-Wl,-z,defs", "-Wl,--as-needed"]


def test_libraries_need_no_newer_symbols(
    manylinux: ModuleType, command: list[str], tmp_path: Path
) -> None:
    plain, portable = tmp_path / "plain.so", tmp_path / "portable.so"
    subprocess.run([*command, "-o", str(plain)], check=True)
    if not (new := manylinux.needed(plain, "2_28")):
        pytest.skip("this machine's glibc and libstdc++ are no newer than manylinux_2_28's")
    replaced = manylinux.link("2_28", portable, command)
    assert (
        new.keys() <= replaced.keys()
        and len({version.partition("_")[0] for version in replaced.values()}) > 1
    )
    assert not manylinux.needed(portable, "2_28")
    # The replacements stay local, because another library's calls must not reach them.
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", str(portable)], capture_output=True, text=True, check=True
    ).stdout
    assert (
        not {line.split()[-1].partition("@")[0] for line in exported.splitlines()} & replaced.keys()
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(portable)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["162.0", "-1", "0"], done.stderr


def test_symbols_missing_on_the_platform_are_reported(
    manylinux: ModuleType, tmp_path: Path
) -> None:
    """The library is removed, because ninja would consider it up to date."""
    newest = max(
        (
            (manylinux.numbers(version), name, version)
            for name, versions in manylinux.dynamic_symbols(
                manylinux.of_this_machine("g++", "libc.so.6"), defined=True
            ).items()
            if len(versions) == 1
            and not name.startswith("_")
            and manylinux.too_new(version := versions[0], "2_28")
            if "PRIVATE" not in version
        ),
        default=None,
    )
    if newest is None:
        pytest.skip("this machine's glibc has nothing that manylinux_2_28 lacks")
    _, name, version = newest
    (tmp_path / "source.c").write_text(f"void {name}(void); void f(void) {{ {name}(); }}\n")
    subprocess.run(
        ["gcc", "-fPIC", "-fno-builtin", "-w", "-c", "source.c"], cwd=tmp_path, check=True
    )
    link = ["g++", "-shared", str(tmp_path / "source.o")]
    tool = [sys.executable, str(CSRC / "manylinux.py"), "2_28", str(tmp_path / "out.so"), *link]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode and f"{name} needs {version}, and no older one is known" in done.stderr
    assert not (tmp_path / "out.so").exists()


def test_platform_is_configurable(manylinux: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTRANSFORMER_MANYLINUX", raising=False)
    assert manylinux.platform() is None and manylinux.rule("g++ $in") == "g++ $in -o $out"
    monkeypatch.setenv("PYTRANSFORMER_MANYLINUX", "2_28")
    assert manylinux.rule("g++ $in").endswith(f"{os.sep}manylinux.py 2_28 $out g++ $in")
    monkeypatch.setenv("PYTRANSFORMER_MANYLINUX", "2_17")
    with pytest.raises(
        ValueError, match="PYTRANSFORMER_MANYLINUX is '2_17'; expected nothing or one of 2_28"
    ):
        manylinux.platform()
