# SPDX-License-Identifier: Apache-2.0
"""Runs PyTorch's attention tests on the CPU, without and with ``activate()``.

A failure that occurs only with ``activate()`` must be listed in KNOWN. The tests are PyTorch's
``test/test_transformers.py`` and the files it imports, which neither PyTorch's wheels nor this
package contain. An older PyTorch's file works, because failures due to its age occur both ways::

    python -m support.pytorch_tests PATH/test/test_transformers.py [-k EXPRESSION]
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

# Test name pattern -> why it fails with ours only.
KNOWN: dict[str, str] = {
    "test_disable_fastpath_cpu": (
        "wants the inference fast path, which is off while ours are active"
    ),
    "test_mask_check_fastpath_cpu": (
        "wants the inference fast path, which is off while ours are active"
    ),
    "test_scaled_dot_product_attention_*_causal_attn_mask_*": (
        "wants an error for a mask with is_causal; ours intersects them"
    ),
    "test_scaled_dot_product_attention_*_dropout_p_0_[25]_cpu": (
        "wants the random numbers of torch.nn.functional.dropout"
    ),
}
PLUGIN = "import pytransformer\npytransformer.activate()\n"


def run(path: Path, options: list[str], *, active: bool) -> dict[str, bool]:
    """Return, by name, whether each test that ran passed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "activated.py").write_text(PLUGIN)
        report = Path(folder, "report.xml")
        plugin = ["-p", "activated"] if active else []
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            str(path),
            *plugin,
            f"--junitxml={report}",
            "--rootdir",
            folder,
            *options,
        ]
        search = os.pathsep.join([folder, *sys.path])
        environment = {
            **os.environ,
            "PYTHONPATH": search,
            "PYTHONSAFEPATH": "1",
            "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(
                f"pytest wrote no report:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        cases = ElementTree.parse(report).getroot().iter("testcase")
        ran = {
            f"{c.get('classname')}.{c.get('name')}": c for c in cases if c.find("skipped") is None
        }
        if not ran:
            raise RuntimeError(f"no test ran:\n{done.stdout[-2000:]}")
        return {
            name: c.find("failure") is None and c.find("error") is None for name, c in ran.items()
        }


def compare(theirs: dict[str, bool], ours: dict[str, bool]) -> tuple[list[str], list[str]]:
    """Return unknown tests that fail only with ours, and known ones that do not fail."""
    new = [name for name, passed in ours.items() if not passed and theirs.get(name, True)]
    known = {
        k: [name for name in new if fnmatch.fnmatchcase(name.rpartition(".")[2], k)] for k in KNOWN
    }
    explained = {name for names in known.values() for name in names}
    return [name for name in new if name not in explained], [
        k for k, names in known.items() if not names
    ]


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0]).is_file():
        print(__doc__)
        return 2
    path, options = Path(arguments[0]).resolve(), arguments[1:]
    theirs, ours = (run(path, options, active=active) for active in (False, True))
    new, outdated = compare(theirs, ours)
    print(
        f"PyTorch's kernels: {sum(theirs.values())} of {len(theirs)} pass. Ours:"
        f" {sum(ours.values())} of {len(ours)}."
    )
    for name in new:
        print(f"fails with ours alone: {name}")
    for name in theirs.keys() - ours.keys():
        print(f"did not run with ours: {name}")
    for name in outdated if not options else ():
        print(f"known, but does not fail: {name}")
    return int(bool(new or theirs.keys() - ours.keys()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
