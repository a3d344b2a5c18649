# SPDX-License-Identifier: Apache-2.0
"""The benchmark cases of the command line under pytest-benchmark.

Each family's file in ops/ gets one test per case, mode and backend:

    pytest bench/ops/attention.py --benchmark-group-by=param:step --size medium -k "causal and fwd"
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytransformer.cli import providers
from pytransformer.cli.benchmark import check, exact, plan, runner
from pytransformer.ops._core.registry import OPS

BACKENDS = ("cpu", "reference", "naive", "torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--size", default="medium", choices=("small", "medium", "large"), help="shape of the cases"
    )
    parser.addoption(
        "--dtype", default="float32", choices=sorted(plan.DTYPES), help="dtype of the inputs"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(
            "these are timed by pytest-benchmark, which is not installed: pip install"
            " pytest-benchmark"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "step" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    ops = [op for op in plan.OPS if OPS[op].family == Path(metafunc.module.__file__).stem]
    steps = plan.chosen(ops, (), option("--size"), {}, [option("--dtype")], plan.QUICK_MODES)
    metafunc.parametrize("step", steps, ids=[f"{s.case.name}-{s.mode}" for s in steps])
    metafunc.parametrize("backend", BACKENDS)


@pytest.fixture
def timed(benchmark, step: plan.Step, backend: str):
    """Check one backend at one step, then time it.

    A wrong result fails; an unsupported step is skipped with its reason.
    """

    def run() -> None:
        problem = providers.Problem.make(
            step.case, step.dtype, "cpu", seed=runner.SEED, grad=step.mode != "fwd"
        )
        provider = next((p for p in providers.providers(step.case.op) if p.name == backend), None)
        if provider is None:
            pytest.skip(f"{step.case.op} has no backend {backend}")
        try:
            prepared = provider.prepare(problem)
            checked = problem.without_dropout() if prepared.own_dropout else problem
            compared = provider.prepare(checked)
        except providers.Unsupported as reason:
            pytest.skip(str(reason))
        grads = check.upstream(checked, runner.SEED) if checked.grad else None
        found = check.compute(checked, compared, grads)
        verdict = check.judge(
            checked, found, exact.solve(checked, grads), peer=backend in providers.PEERS
        )
        assert verdict.wrong is None, verdict.wrong
        benchmark.extra_info.update(
            error=verdict.error, error_bound=verdict.bound, provider=prepared.label
        )
        call = runner.work(problem, prepared, step.mode)
        with prepared.context():
            benchmark(call)

    return run
