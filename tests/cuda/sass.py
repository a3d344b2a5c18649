# SPDX-License-Identifier: Apache-2.0
"""Hazards in SASS for sm_90a, by data flow over the output of cuobjdump.

While a wgmma is in flight, no other instruction may access its accumulators and operand registers.
A group ends with the instruction that has gsb0, and completes at a WARPGROUP.DEPBAR that allows no
more groups than those after it. After a setmaxnreg, no register that it released or did not grant
may be used.

An instruction's text gives the registers that it reads and writes, conservatively: 64 and 128 bits
are two and four registers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

LINE = re.compile(r"\s*/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;")
WGMMA = re.compile(r"HGMMA\.64x(\d+)x16\S*\s+R(\d+),\s*(?:R(\d+),\s*)?gdesc")
REGISTER = re.compile(r"(?<![A-Z])R(\d+)")
ADDRESS = re.compile(r"0x([0-9a-f]+)")
STATES = 1_000_000  # max instructions of a kernel; 10,000 is usual
# Their first operand is no register that they write.
WRITES_NONE = (
    "ST",
    "RED",
    "BAR",
    "SYNCS",
    "UTMA",
    "R2UR",
    "ISETP",
    "FSETP",
    "BRA",
    "EXIT",
    "UBLK",
    "VOTE",
    "PLOP",
    "CCTL",
    "MEMBAR",
    "FENCE",
)
# These may write more than one.
WRITES_WIDE = ("LD", "IMAD", "F2", "I2", "MOV", "SHF", "LEA", "DADD")
Registers = frozenset[int]
NONE: Registers = frozenset()


class Instruction(NamedTuple):
    address: int
    predicated: bool
    text: str

    def __str__(self) -> str:
        return f"{self.address:#x} {self.text}"


class Group(NamedTuple):
    """A group of wgmma in flight; `open`: more may join."""

    accumulators: Registers
    operands: Registers
    open: bool


def _span(first: str | int, count: int) -> Registers:
    return frozenset(range(int(first), int(first) + count))


@functools.lru_cache(maxsize=1 << 16)
def touched(text: str) -> tuple[Registers, Registers]:
    """Return the registers that an instruction writes, and those that it reads."""
    if m := WGMMA.match(text):
        return _span(m[2], int(m[1]) // 2), _span(m[3], 4) if m[3] else NONE
    name, _, rest = text.partition(" ")
    width = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
    operands = re.split(r",(?![^\[]*\])", rest)
    written, read = NONE, NONE
    for i, operand in enumerate(operands):
        first = i == 0 and not name.startswith(WRITES_NONE)
        if "[" in operand:
            count = (
                2 if ".64]" in operand or ".64+" in operand else 1
            )  # an address in global or shared memory
        elif first:
            count = width if name.startswith(WRITES_WIDE) else 1
        else:
            count = (
                width
                if name.startswith(("ST", "RED"))
                else 2
                if "WIDE" in name and i == len(operands) - 1
                else 1
            )
        found = frozenset().union(*(_span(r, count) for r in REGISTER.findall(operand)))
        written, read = (
            (written | found, read) if first and "[" not in operand else (written, read | found)
        )
    return written, read


class Kernel:
    """A kernel's instructions and control flow."""

    def __init__(self, lines: Iterable[str]) -> None:
        matches = filter(None, map(LINE.match, lines))
        self.code = [Instruction(int(m[1], 16), bool(m[2]), m[3]) for m in matches]
        self.at = {instruction.address: i for i, instruction in enumerate(self.code)}
        self.indirect = [
            i for i, instruction in enumerate(self.code) if instruction.text.startswith("BRX")
        ]
        # An indirect branch does not name its targets: they are the instructions after a jump
        # without another branch to them, up to the next such instruction.
        targets = {
            self._target(i)
            for i, instruction in enumerate(self.code)
            if re.match("BRA|CALL", instruction.text)
        }
        self.orphans = [
            i + 1
            for i, instruction in enumerate(self.code[:-1])
            if re.match(r"(BRA|EXIT|BRXU?|RET)\b", instruction.text)
            and not instruction.predicated
            and i + 1 not in targets
            and not self.code[i + 1].text.startswith(("NOP", "BRA"))
        ]

    def _target(self, i: int) -> int | None:
        found = ADDRESS.search(self.code[i].text)
        return self.at.get(int(found[1], 16)) if found else None

    def after(self, i: int) -> list[int]:
        """Return the possible next instructions."""
        _, predicated, text = self.code[i]
        following = [i + 1] if i + 1 < len(self.code) else []
        if text.startswith("BRX"):
            end = next((j for j in self.indirect if j > i), len(self.code))
            return [j for j in self.orphans if i < j <= end]
        if text.startswith("BRA"):
            target = self._target(i)
            stays = following if predicated or re.match(r"BRA(\.\S+)?\s+!?U?P\d", text) else []
            return ([target] if target is not None else []) + stays
        if text.startswith("EXIT"):
            return following if predicated else []
        return [] if text.startswith("RET") else following

    def reached(self, start: int) -> set[int]:
        seen, ahead = set(), [start]
        while ahead:
            i = ahead.pop()
            if i not in seen:
                seen.add(i)
                ahead += self.after(i)
        return seen

    def touched(self, i: int) -> tuple[Registers, Registers]:
        """Return the registers of the instruction, or of the function that it calls."""
        text = self.code[i].text
        target = self._target(i) if text.startswith("CALL") else None
        if target is None:
            return touched(text)
        both = [touched(self.code[j].text) for j in self.reached(target)]
        return frozenset().union(*(w for w, _ in both)), frozenset().union(*(r for _, r in both))


def _joined(flight: tuple[Group, ...], text: str) -> tuple[Group, ...]:
    """Return the groups in flight after a wgmma."""
    accumulators, operands = touched(text)
    if flight and flight[-1].open:
        accumulators, operands = (
            accumulators | flight[-1].accumulators,
            operands | flight[-1].operands,
        )
        flight = flight[:-1]
    return (*flight, Group(accumulators, operands, "gsb0" not in text))


def _clashes(kernel: Kernel, i: int, flight: tuple[Group, ...]) -> str | None:
    """Return the instruction's hazards with these groups in flight."""
    text = kernel.code[i].text
    written, read = kernel.touched(i)
    if WGMMA.match(text):
        overlaps = any(written & g.accumulators and written != g.accumulators for g in flight)
        if overlaps or any(written & g.operands or read & g.accumulators for g in flight):
            return "shares some of its registers with a wgmma in flight"
        return None
    accumulators = frozenset().union(*(g.accumulators for g in flight))
    operands = frozenset().union(*(g.operands for g in flight))
    if found := (written | read) & accumulators:
        return f"touches R{min(found)}, which a wgmma in flight adds to"
    if found := written & operands:
        return f"overwrites R{min(found)}, which a wgmma in flight reads"
    return None


def wgmma_faults(kernel: Kernel) -> list[str]:
    """Return accesses to registers of a wgmma in flight, and groups without a wait."""
    found: set[str] = set()
    seen: set[tuple[int, tuple[Group, ...]]] = set()
    ahead: list[tuple[int, tuple[Group, ...]]] = [(0, ())] if kernel.code else []
    while ahead:
        i, flight = ahead.pop()
        if (i, flight) in seen:
            continue
        seen.add((i, flight))
        if len(seen) > STATES:
            return ["too many states to follow"]
        here = kernel.code[i]
        if flight and (clash := _clashes(kernel, i, flight)):
            found.add(f"{here}: {clash}")
        if WGMMA.match(here.text):
            flight = _joined(flight, here.text)
        elif m := re.match(r"WARPGROUP\.DEPBAR\S* gsb0, 0x([0-9a-f]+)", here.text):
            if flight and flight[-1].open:
                found.add(f"{here}: waits before the last group ends")
            flight = flight[max(0, len(flight) - int(m[1], 16)) :]
        elif here.text.startswith("EXIT") and not here.predicated and flight:
            found.add(f"{here}: a wgmma is in flight")
        ahead += [(j, flight) for j in kernel.after(i)]
    return sorted(found)


def register_faults(kernel: Kernel) -> list[str]:
    """Return uses of registers that a setmaxnreg released or did not grant."""
    found = []
    for start, instruction in enumerate(kernel.code):
        m = re.match(r"USETMAXREG\.(?:DEALLOC|TRY_ALLOC)\S* .*?0x([0-9a-f]+)$", instruction.text)
        if m is None:
            continue
        for i in kernel.reached(start):
            if (highest := max(frozenset().union(*touched(kernel.code[i].text)), default=0)) >= int(
                m[1], 16
            ):
                found.append(f"{kernel.code[i]}: uses R{highest} after {instruction}")
    return sorted(set(found))


# Work that a schedule counts.
WORK = {"EX2": "MUFU.EX2", "F2FP": "F2FP", "STSM": "STSM", "STS": "STS.128"}


def schedule(lines: Iterable[str]) -> str:
    """Return the order of products, waits and work in a kernel, as "64x128 EX2*32 WAIT1 ...".

    A product is a group of wgmmas, named by its shape without K, and stands where its first wgmma
    is. "t" marks a transposed A and "r" an A in registers. Work is counted up to the next product,
    wait or barrier.
    """
    steps: list[str] = []
    counts: dict[str, int] = {}
    is_open = False  # further wgmmas belong to the last product

    def anchor(name: str) -> None:
        steps.extend(f"{work}*{counts[work]}" for work in WORK if work in counts)
        steps.append(name)
        counts.clear()

    for text in (m[3] for m in map(LINE.match, lines) if m):
        if m := re.match(r"HGMMA\.(64x\d+)x16\S*\s+R\d+,\s*(gdesc)?", text):
            if not is_open:
                mark = "t" if "tnspA" in text else "" if m[2] else "r"
                anchor(m[1] + mark)
            is_open = "gsb0" not in text
        elif m := re.match(r"WARPGROUP\.DEPBAR\S* gsb0, 0x([0-9a-f]+)", text):
            anchor(f"WAIT{int(m[1], 16)}")
        elif text.startswith("BAR.SYNC"):
            anchor("BAR")
        elif work := next((w for w, opcode in WORK.items() if text.startswith(opcode)), None):
            counts[work] = counts.get(work, 0) + 1
    anchor("END")
    return " ".join(steps)


def faults(lines: Iterable[str]) -> list[str]:
    """Return the faults of a kernel's SASS, one per line."""
    kernel = Kernel(lines)
    return wgmma_faults(kernel) + register_faults(kernel)
