# SPDX-License-Identifier: Apache-2.0
"""Makes what a committed results folder does not keep, from its results.json: report.md, results.csv, the plots.

python bench/tools/redraw.py bench/results/intel-xeon-amx-2-cores               # beside results.json; git ignores them there
python bench/tools/redraw.py bench/results/intel-xeon-amx-2-cores --out FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pytransformer.cli.benchmark import curves, plots, report


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with a results.json")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: there)")
    options = parser.parse_args(arguments)
    document, out = report.load(options.folder / "results.json"), options.out or options.folder
    out.mkdir(parents=True, exist_ok=True)
    drawn = plots.draw_all(out, document) + curves.draw_all(out, document) if plots.why_not() is None else []
    written = report.write_all(out, document, drawn)
    print(f"{out}: {', '.join([*(path.name for path in written), *drawn])}")


if __name__ == "__main__":
    main()
