# SPDX-License-Identifier: Apache-2.0
"""Link a library that loads with an older glibc and libstdc++ than the build machine's.

    python csrc/manylinux.py 2_28 OUTPUT COMMAND...    ninja's link command for a wheel's libraries

COMMAND ends before `-o OUTPUT`. A linker binds a call to a symbol's newest version on the build
machine (`pthread_create@GLIBC_2.34`), although the same libraries still define the old one. So a
library is linked twice. The first link shows which symbols are too new for the platform. An archive
then defines them as hidden symbols, which the second link prefers over any shared library:

- a glibc function: a jump to the newest version that the platform has;
- `__libc_single_threaded` (glibc 2.32): a byte that says "perhaps not", which is always correct;
- a libstdc++ symbol: the members of libstdc++.a that define it.

Sources for the platforms: PEP 600 and auditwheel's policy table. `auditwheel repair` makes the
final check (bench/tools/wheel.py).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# Newest version of each symbol set per platform.
PLATFORMS = {
    "2_28": {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
}
ROUNDS = 4  # a member of libstdc++.a may need another symbol that is too new
JUMP = """\
    .globl {name}
    .hidden {name}
    .type {name}, @function
{name}:
    endbr64
    jmp *pt_old_{name}@GOTPCREL(%rip)
    .symver pt_old_{name}, {name}@{version}
"""
SINGLE_THREADED = """\
    .section .rodata
    .globl __libc_single_threaded
    .hidden __libc_single_threaded
    .type __libc_single_threaded, @object
    .size __libc_single_threaded, 1
__libc_single_threaded:
    .byte 0
    .text
"""


def platform() -> str | None:
    """Return the platform in PYTRANSFORMER_MANYLINUX, or None for the build machine.

    Raises:
        ValueError: the platform is unknown.
    """
    wanted = os.environ.get("PYTRANSFORMER_MANYLINUX", "").strip()
    if wanted and wanted not in PLATFORMS:
        raise ValueError(
            f"PYTRANSFORMER_MANYLINUX is {wanted!r}; expected nothing or one of"
            f" {', '.join(PLATFORMS)}"
        )
    return wanted or None


def rule(command: str) -> str:
    """Return ninja's command for a link by ``command``, which names no output."""
    wanted = platform()
    return (
        f"{command} -o $out"
        if wanted is None
        else f"{shlex.join([sys.executable, __file__, wanted])} $out {command}"
    )


class TooNew(RuntimeError):
    """A symbol that the platform lacks and that nothing here replaces."""


def numbers(version: str) -> tuple[str, tuple[int, ...]]:
    """Return ("GLIBC", (2, 34)) for "GLIBC_2.34".

    A version without a number, such as GLIBC_PRIVATE, sorts after all others.
    """
    name, _, rest = version.partition("_")
    return name, tuple(int(part) if part.isdigit() else sys.maxsize for part in rest.split("."))


def too_new(version: str, platform: str) -> bool:
    name, found = numbers(version)
    newest = PLATFORMS[platform].get(name)
    return newest is not None and found > newest


def dynamic_symbols(library: Path, defined: bool) -> dict[str, list[str]]:
    """Return the versions of each symbol that the library defines or needs, by symbol name."""
    listed = subprocess.run(
        ["readelf", "-W", "--dyn-syms", str(library)], capture_output=True, text=True, check=True
    ).stdout
    found = defaultdict(list)
    for line in listed.splitlines():
        fields = line.split()
        if len(fields) >= 8 and (fields[6] != "UND") == defined and "@" in fields[7]:
            name, version = re.split("@+", fields[7], maxsplit=1)
            found[name].append(version)
    return dict(found)


def needed(library: Path, platform: str) -> dict[str, str]:
    """Return the symbols too new for the platform that the library needs, with their versions."""
    return {
        name: version
        for name, versions in dynamic_symbols(library, defined=False).items()
        for version in versions
        if too_new(version, platform)
    }


def of_this_machine(compiler: str, name: str) -> Path:
    said = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return Path(said).resolve()


def jumps(symbols: dict[str, str], platform: str, compiler: str) -> str:
    """Return assembly that defines glibc functions by the newest version that the platform has."""
    known: dict[str, list[str]] = defaultdict(list)
    for library in ("libc.so.6", "libm.so.6"):
        for name, versions in dynamic_symbols(
            of_this_machine(compiler, library), defined=True
        ).items():
            known[name] += versions
    text = "    .text\n"
    for name, version in sorted(symbols.items()):
        if name == "__libc_single_threaded":
            text += SINGLE_THREADED
            continue
        old = [v for v in known[name] if numbers(v)[0] == "GLIBC" and not too_new(v, platform)]
        if not old:
            raise TooNew(f"{name} needs {version}, and no older one is known")
        text += JUMP.format(name=name, version=max(old, key=numbers))
    return text + '    .section .note.GNU-stack, "", @progbits\n'


def members(symbols: set[str], platform: str, compiler: str) -> tuple[Path, set[str]]:
    """Return libstdc++.a and its members that define the symbols.

    The members include those they need in turn and libstdc++.so does not export.
    """
    archive = of_this_machine(compiler, "libstdc++.a")
    listed = subprocess.run(
        ["nm", "-A", str(archive)], capture_output=True, text=True, check=True
    ).stdout
    defines: dict[str, str] = {}
    needs: dict[str, set[str]] = defaultdict(set)
    for line in listed.splitlines():
        member, kind, name = line.removeprefix(f"{archive}:").partition(":")[0], *line.split()[-2:]
        if kind == "U":
            needs[member].add(name)
        elif kind != "w":
            defines.setdefault(name, member)
    if missing := symbols - defines.keys():
        raise TooNew(f"libstdc++.a does not define {', '.join(sorted(missing))}")
    library = dynamic_symbols(of_this_machine(compiler, "libstdc++.so.6"), defined=True)
    exported = {
        name
        for name, versions in library.items()
        if not all(too_new(version, platform) for version in versions)
    }
    chosen: set[str] = set()
    while symbols:
        new = {defines[name] for name in symbols} - chosen
        chosen |= new
        symbols = {
            name
            for member in new
            for name in needs[member]
            if name in defines and name not in exported
        }
    return archive, chosen


def replacements(symbols: dict[str, str], platform: str, folder: Path, compiler: str) -> Path:
    """Build the archive that defines the symbols and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    of_glibc = {name: version for name, version in symbols.items() if version.startswith("GLIBC_")}
    source = folder / "glibc.s"
    source.write_text(jumps(of_glibc, platform, compiler))
    subprocess.run([compiler, "-c", str(source), "-o", str(folder / "glibc.o")], check=True)
    if of_libstdcxx := symbols.keys() - of_glibc.keys():
        archive, names = members(set(of_libstdcxx), platform, compiler)
        subprocess.run(["ar", "x", str(archive), *sorted(names)], cwd=folder, check=True)
    output = folder / "replacements.a"
    subprocess.run(["ar", "rcs", str(output), *map(str, sorted(folder.glob("*.o")))], check=True)
    return output


def link(platform: str, output: Path, command: list[str], compiler: str = "g++") -> dict[str, str]:
    """Link until no symbol is too new; return the replaced symbols with the versions they had."""
    replaced: dict[str, str] = {}
    extra: list[str] = []
    for _ in range(ROUNDS):
        subprocess.run([*command, *extra, "-o", str(output)], check=True)
        found = needed(output, platform)
        if not found:
            return replaced
        if again := found.keys() & replaced.keys():
            raise TooNew(
                f"{', '.join(sorted(again))} of {output.name} are replaced and still needed"
            )
        replaced |= found
        archive = replacements(replaced, platform, output.with_suffix(".replaced"), compiler)
        words = (
            "--whole-archive",
            str(archive),
            "--no-whole-archive",
            f"--exclude-libs={archive.name}",
        )
        extra = [part for word in words for part in ("-Xlinker", word)]
    raise TooNew(
        f"{output.name} still needs {', '.join(sorted(needed(output, platform)))} after {ROUNDS}"
        " links"
    )


if __name__ == "__main__":
    try:
        done = link(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    except (TooNew, subprocess.CalledProcessError) as error:
        Path(sys.argv[2]).unlink(missing_ok=True)
        told = (
            shlex.join(map(str, error.cmd))
            if isinstance(error, subprocess.CalledProcessError)
            else str(error)
        )
        sys.exit(f"manylinux_{sys.argv[1]}: {told}")
