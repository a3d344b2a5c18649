# SPDX-License-Identifier: Apache-2.0
"""Print which entries of pytransformer/ops/_core/verified.json are current; update them.

    python bench/tools/verified.py                     # each entry: current or stale
    python bench/tools/verified.py --tested COMMIT     # after a GPU run of that commit
    python bench/tools/verified.py --carry REASON      # sources changed, GPU programs did not
    python bench/tools/verified.py --drop              # remove stale entries

--tested records the sources of the commit. --carry is for changes after which the compiler gets the
same program (comments, names, emulator code) or which only select among tested kernels; the reason
is stored. Every other change needs --drop, and the kernel is checked at first use until a GPU has
run the tests again. --backend and --family select entries. See docs/design/verification.md.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
from pathlib import Path
from typing import Any

from pytransformer.ops._core import verification
from pytransformer.ops._core.registry import OPS

ROOT = Path(__file__).resolve().parents[2]


def sources(backend: str, root: Path = ROOT) -> dict[str, str]:
    """Return the digests of the checkout's kernels, built or not."""
    if backend == "cuda":
        return dict(
            runpy.run_path(str(root / "csrc" / "interface.py"))["cuda_sources"](root / "csrc")
        )
    families = dict.fromkeys(op.family for op in OPS.values())
    folder = root / "kernels"
    return {s: verification.digest(folder, [folder / s, *folder.glob("*.py")]) for s in families}


def stale(table: dict[str, Any], root: Path = ROOT) -> list[tuple[str, str, str]]:
    """Return (architecture, backend, family) of entries whose kernels changed."""
    return [
        (arch, backend, family)
        for arch, backends in table.items()
        for backend, entry in backends.items()
        for family, result in entry["families"].items()
        if sources(backend, root).get(family) != result["sources"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tested", metavar="COMMIT")
    parser.add_argument("--carry", metavar="REASON")
    parser.add_argument("--drop", action="store_true")
    parser.add_argument("--backend", action="append")
    parser.add_argument("--family", action="append")
    options = parser.parse_args()
    table = json.loads(verification.SHIPPED.read_text())
    changed = stale(table)
    for arch, backends in table.items():
        for backend, entry in backends.items():
            for family, result in list(entry["families"].items()):
                skipped = backend not in (options.backend or [backend])
                if skipped or family not in (options.family or [family]):
                    continue
                is_stale = (arch, backend, family) in changed
                print(arch, backend, family, "STALE" if is_stale else "current", result)
                if options.tested:
                    commit = ["git", "rev-parse", "--short", options.tested]
                    commit_hash = subprocess.check_output(commit, cwd=ROOT, text=True).strip()
                    entry["families"][family] = {
                        "tested": commit_hash,
                        "sources": sources(backend)[family],
                    }
                elif is_stale and options.carry:
                    result |= {"sources": sources(backend)[family]}
                    result["carried"] = [*result.get("carried", ()), options.carry]
                elif is_stale and options.drop:
                    del entry["families"][family]
    verification.SHIPPED.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
