# SPDX-License-Identifier: Apache-2.0
"""Faults at the calls of ptx functions, and the problem that detects each.

    python tests/emulator/sites.py          find problems for faults that sites.json lacks:
                                            12 minutes and more
    python tests/emulator/sites.py --all    find all of them: 40 minutes

The emulator changes one call in the sources (csrc/emulator/sites.h): it drops the call, shifts an
address or flips a parity. sites.json names each fault by instruction, file and the text of the
line, so code may move. It gives the problem that detects the fault, or the reason why none does.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent))  # under PYTHONSAFEPATH it is not there
sys.path.append(str(Path(__file__).parents[1] / "support"))
import planted

LISTED = Path(__file__).with_name("sites.json")
LIBRARY = planted.CSRC.parent / "build" / "emulator" / "libpytransformer_emulated.so"
# The modules of problems, with PYTRANSFORMER_CUDA_PATH.
RUNS = (
    ("attention_problems", "portable"),
    ("block_list_problems", "portable"),
    ("split_problems", "portable"),
    ("page_problems", "portable"),
    ("eight_bit_problems", "portable"),
    ("append_problems", "portable"),
    ("rotary_problems", "portable"),
    ("layer_norm_problems", "portable"),
    ("matmul_problems", "sm90"),
    ("feed_forward_problems", "sm90"),
    ("cross_entropy_problems", "sm90"),
    ("start_problems", "sm90"),
    ("sm90_problems", "sm90"),
)
TO_EXPLAIN = "no problem finds it: say why, or write one"
TRIED = 12  # problems that reach a site, the fastest first


class Run(NamedTuple):
    """A problem in the emulator."""

    problems: str
    path: str
    problem: str


class SiteFault(NamedTuple):
    """A fault at the calls of one instruction on one line."""

    file: str  # below csrc/
    instruction: str
    text: str  # the text of the line
    fault: str

    def __str__(self) -> str:
        return f"{self.fault} {self.instruction} | {self.file} | {self.text}"

    def planted(self) -> str | None:
        """Return PYTRANSFORMER_FAULT, or None if the file has no such line."""
        places = lines(self.file)
        return (
            f"{self.fault}@{self.file}:{places.index(self.text) + 1}"
            if self.text in places
            else None
        )


@functools.cache
def lines(file: str) -> list[str]:
    """Return the lines of a file below csrc/, without indentation.

    A repeated text ends in " #2".
    """
    seen, found = Counter[str](), []
    for line in (planted.CSRC / file).read_text().splitlines():
        seen[text := line.strip()] += 1
        found.append(text if seen[text] == 1 else f"{text} #{seen[text]}")
    return found


def parsed(text: str) -> SiteFault:
    what, file, line = text.split(" | ", 2)
    fault, instruction = what.split(" ", 1)
    return SiteFault(file, instruction, line, fault)


def entries() -> dict[SiteFault, Run | str]:
    """Return sites.json: the problem that detects each fault, or the reason why none does."""
    read = json.loads(LISTED.read_text()) if LISTED.is_file() else {}
    return {
        parsed(name): found if isinstance(found, str) else Run(*found)
        for name, found in read.items()
    }


def listed() -> dict[SiteFault, Run]:
    return {fault: found for fault, found in entries().items() if isinstance(found, Run)}


def unseen() -> dict[SiteFault, str]:
    return {fault: found for fault, found in entries().items() if isinstance(found, str)}


def reached(library: Path, run: Run) -> tuple[set[SiteFault], float]:
    """Return the faults at all calls of a problem, and the seconds it takes."""
    with tempfile.TemporaryDirectory() as folder:
        record, start = Path(folder) / "sites", time.monotonic()
        wrong = planted.found(
            library, run.problems, "", 1, run.problem, run.path, PYTRANSFORMER_SITES=str(record)
        )
        assert not wrong, f"{run}: {wrong}"
        took, found = time.monotonic() - start, set[SiteFault]()
        for line in record.read_text().splitlines() if record.is_file() else ():
            place, rest = line.split(" ", 1)
            instruction, faults = rest.rsplit(" ", 1)
            file, number = place.rsplit(":", 1)
            found |= {
                SiteFault(file, instruction, lines(file)[int(number) - 1], fault)
                for fault in faults.split(",")
            }
    return found, took


def finds(library: Path, fault: SiteFault, run: Run, schedule: int = 1) -> bool:
    """Return True if the problem detects the fault.

    The process prints a message or a wrong number, crashes or hangs.
    """
    place = fault.planted()
    assert place is not None, f"the sources have no such line: {fault}"
    try:
        return bool(planted.found(library, run.problems, place, schedule, run.problem, run.path))
    except RuntimeError:
        return True


def problems() -> Iterator[Run]:
    for module, path in RUNS:
        names = dict.fromkeys(
            getattr(problem, "name", "") for problem in importlib.import_module(module).problems()
        )
        yield from (Run(module, path, name) for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--library",
        type=Path,
        default=LIBRARY,
        help="the emulated library, as tests/emulator built it",
    )
    parser.add_argument("--all", action="store_true", help="look for every fault again")
    arguments = parser.parse_args()
    known = {} if arguments.all else entries()
    by_fault: dict[SiteFault, list[tuple[float, Run]]] = defaultdict(list)
    with ThreadPoolExecutor(2) as pool:
        for run, (faults, took) in _with_progress(
            pool, lambda run: reached(arguments.library, run), list(problems())
        ):
            for fault in faults:
                by_fault[fault].append((took, run))
        kept = {fault: run for fault, run in known.items() if fault in by_fault}
        missing = sorted(set(by_fault) - set(kept))
        search = lambda fault: next(
            (
                run
                for _, run in sorted(by_fault[fault])[:TRIED]
                if finds(arguments.library, fault, run)
            ),
            None,
        )
        for fault, run in _with_progress(pool, search, missing):
            kept[fault] = run or TO_EXPLAIN
            if run is None:
                print("not found:", fault, flush=True)
            write(kept)
    return 0


def write(found: dict[SiteFault, Run | str]) -> None:
    """Write sites.json, one line per fault."""
    lines = (f"{json.dumps(str(fault))}: {json.dumps(found[fault])}" for fault in sorted(found))
    LISTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _with_progress(
    pool: ThreadPoolExecutor, function: Callable[[Any], Any], items: list[Any]
) -> Iterator[tuple[Any, Any]]:
    for number, (item, result) in enumerate(zip(items, pool.map(function, items)), 1):
        if number % 20 == 0:
            print(f"{number} of {len(items)}", flush=True)
        yield item, result


if __name__ == "__main__":
    sys.exit(main())
