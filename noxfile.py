# SPDX-License-Identifier: Apache-2.0
"""Test the supported versions of Python, torch and transformers.

    nox --list
    nox -s "ops-3.13(torch='2.14.1')"
    nox -s newest                    # the newest release of everything, as the nightly workflow
                                     does

A session installs from the package index that pip is configured for. Set PIP_EXTRA_INDEX_URL to an
index with CPU builds of torch; the default build for Linux downloads CUDA.
"""

import nox

PYTHON = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCH = ("2.11.0", "2.13.0", "2.14.1")
TRANSFORMERS = ("5.17.0", "5.23.0", "5.24.0")
TESTS = ("pytest", "pytest-benchmark", "pytest-xdist", "numpy", "expecttest", "scikit-learn")
OPS = ("tests/ops", "tests/nn", "tests/cpu")
MODELS = ("tests/models", "tests/integrations")
nox.options.sessions = ["ops", "transformers"]


def install(session: nox.Session, *packages: str) -> None:
    """Install the given packages, then this checkout with CPU kernels for this machine."""
    session.install("setuptools>=77", "pybind11>=2.13", "ninja>=1.11", *TESTS, *packages)
    environment = {"PYTRANSFORMER_CPU": "1", "PYTRANSFORMER_CUDA": "0"}
    session.install("--no-build-isolation", "--no-deps", ".", env=environment)


def test(session: nox.Session, *paths: str) -> None:
    """Run the quick tests of the paths on the installed package, not on the checkout's."""
    quick = ("-q", "-n", "2", "--dist", "loadfile", "-m", "not slow and not gpu")
    session.run("pytest", *quick, *(session.posargs or paths), env={"PYTHONSAFEPATH": "1"})


@nox.session(python=PYTHON)
@nox.parametrize("torch", TORCH)
def ops(session: nox.Session, torch: str) -> None:
    """The ops and modules on every Python with every supported torch."""
    install(session, f"torch=={torch}")
    test(session, *OPS)


@nox.session(python="3.12")
@nox.parametrize("transformers", TRANSFORMERS)
def transformers(session: nox.Session, transformers: str) -> None:
    """Models and integrations with the oldest supported, the pinned and the newest transformers."""
    install(session, "torch==2.13.0", f"transformers=={transformers}", "safetensors", "tokenizers")
    test(session, *MODELS)


@nox.session(python="3.12")
def tools(session: nox.Session) -> None:
    """Adapters, offloading, quantization and embedders around converted models."""
    others = ("peft", "accelerate", "torchao", "sentence-transformers")
    install(session, "torch==2.13.0", "transformers==5.23.0", "safetensors", "tokenizers", *others)
    test(session, "tests/integrations/test_tools.py")


@nox.session(python=["3.13"])
def newest(session: nox.Session) -> None:
    """Everything with the newest release of every dependency, pre-releases included."""
    install(session, "--pre", "torch", "triton", "transformers", "safetensors", "tokenizers")
    test(session, *OPS, *MODELS)
