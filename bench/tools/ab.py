# SPDX-License-Identifier: Apache-2.0
"""Time two checkouts in turns, several times each, and compare them beyond noise.

    python bench/tools/ab.py OLD NEW --repeat 3 -- attention --case causal --dtype bf16

The arguments after -- are those of `pytransformer bench`. OLD and NEW are folders with this package
and its built native code (`git worktree add OLD COMMIT`, `make build` there). Each run is a
separate process, and OLD and NEW alternate, so that drift of the machine affects both. The exit
code is that of `compare.py`: 1 if anything got worse.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def python(checkout: Path, *arguments: str) -> int:
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="runs of each (default %(default)s)"
    )
    parser.add_argument(
        "--threshold",
        default="0.1",
        metavar="X",
        help="a change counts from this share on (default %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the runs are kept (default: a new folder in /tmp)",
    )
    words = sys.argv[1:]
    # The rest is for `pytransformer bench`.
    middle = words.index("--") if "--" in words else len(words)
    options, bench = parser.parse_args(words[:middle]), words[middle + 1 :]
    for checkout in (options.old, options.new):
        if not (checkout / "pytransformer" / "__init__.py").is_file():
            parser.error(f"{checkout} holds no pytransformer")
    folder = options.out or Path(tempfile.mkdtemp(prefix="pytransformer-ab-"))
    for turn in range(options.repeat):
        pair = [("old", options.old), ("new", options.new)]
        for name, checkout in pair if turn % 2 == 0 else reversed(pair):
            out = str((folder / name / str(turn)).resolve())
            options_of_run = ("--no-memory", "--no-plots", "--out", out)
            if python(checkout, "-m", "pytransformer", "bench", *bench, *options_of_run) > 1:
                return 2
    ends = (str(folder / "old"), str(folder / "new"))
    compare = str(Path(__file__).with_name("compare.py"))
    return python(options.new, compare, *ends, "--threshold", options.threshold)


if __name__ == "__main__":
    sys.exit(main())
