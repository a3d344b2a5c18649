# SPDX-License-Identifier: Apache-2.0
"""Human translations from installed packages: gettext catalogs, read in place.

A catalog is a file `<language>/LC_MESSAGES/<domain>.mo` (or `.po`); its message ids are the English
texts. The reader uses only files in the package's record and copies nothing. Each package's license
still applies and is reported.

Source of the formats: the GNU gettext manual, "The Format of GNU MO Files" and "The Format of PO
Files".
"""

from __future__ import annotations

import importlib.metadata
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pytransformer.extras import require
from pytransformer.training.text import Pair

from .cleaning import clean_pair

ENGLISH = "en"
_MAGIC = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
# An id such as label_title or batch.next.
_SYMBOLIC = re.compile(r"[a-z0-9]+(?:[_.:][a-z0-9]+)+", re.IGNORECASE)
_DEFAULT = re.compile(r'Default: "(.*)"', re.DOTALL)


class Key(NamedTuple):
    """A message's key, equal in every language of a catalog; form is 0, or 1 for the plural."""

    context: str
    id: str
    form: int


class Message(NamedTuple):
    english: str
    text: str


class Catalogues(NamedTuple):
    """The catalogs of one package: (folder, domain) -> language -> file."""

    package: str  # with its version
    licence: str
    files: dict[tuple[Path, str], dict[str, Path]]


class Corpus(NamedTuple):
    """Sentence pairs, their sources, and the counts of pairs that cleaning removed, by reason."""

    pairs: list[Pair]
    packages: list[str]  # "Django 5.2.19, licence BSD-3-Clause: 1091 pairs"
    left_out: dict[str, int]


def language_tag(name: str) -> str:
    """Return a language tag in lower case with "_": "pt-BR" and "pt_br" give "pt_br"."""
    return name.replace("-", "_").lower()


def speaks(language: str, wanted: str) -> bool:
    """Return True if the language matches: "pt" matches "pt_BR"; "pt_BR" only itself."""
    return language_tag(language) == language_tag(wanted) or language_tag(language).startswith(
        language_tag(wanted) + "_"
    )


def find_catalogues(package: str) -> Catalogues:
    """Return the catalogs of an installed package, given its pip name.

    If a catalog also exists as `.po` and `polib` is installed, the `.po` file is read, because it
    has the English text of symbolic ids.

    Raises:
        ValueError: the package is not installed, has no record of its files, or no catalog.
        ImportError: its catalogs are `.po` files only, and polib is not installed.
    """
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"gettext:{package}: no such package is installed; pip install {package}"
        ) from error
    if found.files is None:
        raise ValueError(
            f"gettext:{package}: its installation has no record of its files; install it from a"
            " wheel"
        )
    with_polib = _has_polib()
    files: dict[tuple[Path, str], dict[str, Path]] = defaultdict(dict)
    # The preferred kind comes last.
    for file in sorted(found.files, key=lambda f: (f.suffix == ".po") == with_polib):
        if file.suffix in (".mo", ".po") and file.parent.name == "LC_MESSAGES":
            path = Path(str(found.locate_file(file)))
            files[path.parents[2], path.stem][path.parents[1].name] = path
    if not files:
        raise ValueError(
            f"gettext:{package}: it has no gettext catalogue, <language>/LC_MESSAGES/<domain>.mo"
        )
    if not with_polib and all(
        path.suffix == ".po" for languages in files.values() for path in languages.values()
    ):
        require("polib", "corpora", f"reading the .po files of {package}")
    return Catalogues(
        f"{found.metadata['Name']} {found.version}", licence_of(found.metadata), dict(files)
    )


def licence_of(metadata: Any) -> str:
    """Return the license from a package's metadata, shortened, or "not named".

    The field License may contain a full text.
    """
    classifiers = [
        c.rpartition(" :: ")[2]
        for c in metadata.get_all("Classifier") or []
        if c.startswith("License ::")
    ]
    text = (metadata.get("License") or "").strip()
    return (
        metadata.get("License-Expression")
        or (text if "\n" not in text else "")
        or ", ".join(classifiers)
        or "not named"
    )


def catalogue_pairs(packages: Iterable[str], source: str, target: str) -> Corpus:
    """Return each message translated into both languages, cleaned (:mod:`.cleaning`), once.

    English is the message itself or, for an id such as "label_title", the text in the `en` catalog
    or in the .po file's comment.

    Args:
        packages: pip names.
        source, target: languages as catalogs name them: "pt", "de", "pt_BR". "pt" includes its
            variants.

    Raises:
        ValueError: there is no package or no such pair, the languages are equal, or
            :func:`find_catalogues` fails.
    """
    if language_tag(source) == language_tag(target):
        raise ValueError(f"gettext: --from and --to are both {source!r}; expected two languages")
    kept: dict[Pair, None] = {}
    left_out: dict[str, int] = defaultdict(int)
    described = []
    for package in packages:
        found, before = find_catalogues(package), len(kept)
        for languages in found.files.values():
            for raw in _aligned(languages, source, target):
                cleaned = clean_pair(*raw)
                if isinstance(cleaned, str):
                    left_out[cleaned] += 1
                elif cleaned in kept:
                    left_out["a duplicate"] += 1
                else:
                    kept[cleaned] = None
        described.append(f"{found.package}, licence {found.licence}: {len(kept) - before} pairs")
    if not kept:
        raise ValueError(
            f"gettext: no pair of {source} and {target} in {', '.join(described) or 'no package'}"
        )
    return Corpus(list(kept), described, dict(left_out))


def _aligned(languages: dict[str, Path], source: str, target: str) -> Iterator[tuple[str, str]]:
    """Yield (source text, target text) of each common message, for every pair of variants."""
    wanted = (source, target)
    read = {
        name: read_catalogue(path)
        for name, path in languages.items()
        if name == ENGLISH or any(speaks(name, language) for language in wanted)
    }
    ones, others = (
        [_english(read)] if language == ENGLISH else _variants(read, language)
        for language in wanted
    )
    for one in ones:
        for other in others:
            yield from ((text, other[key]) for key, text in one.items() if key in other)


def _variants(read: dict[str, dict[Key, Message]], language: str) -> list[dict[Key, str]]:
    return [
        {key: m.text for key, m in messages.items()}
        for name, messages in read.items()
        if speaks(name, language)
    ]


def _english(read: dict[str, dict[Key, Message]]) -> dict[Key, str]:
    """Return the English text of every message, except those known only by an id."""
    texts = {
        key: message.english for messages in read.values() for key, message in messages.items()
    }
    texts |= {key: message.text for key, message in read.get(ENGLISH, {}).items()}
    return {
        key: text
        for key, text in texts.items()
        if text != key.id or not _SYMBOLIC.fullmatch(key.id)
    }


def english_messages(found: Catalogues) -> Iterator[str]:
    """Yield every English text of a package's catalogs.

    A .mo file has only translated messages, so `en` and the three largest files of each domain are
    read.
    """
    for languages in found.files.values():
        large = sorted(languages, key=lambda name: -languages[name].stat().st_size)[:3]
        read = {
            name: read_catalogue(languages[name])
            for name in sorted({*large, ENGLISH} & languages.keys())
        }
        yield from dict.fromkeys(_english(read).values())


def read_catalogue(path: Path) -> dict[Key, Message]:
    """Return a file's translated messages, without fuzzy and obsolete ones.

    Plurals are included if the language has two forms.

    Raises:
        ValueError: the file is damaged.
        ImportError: the file is .po and polib is not installed.
    """
    entries = _read_mo(path) if path.suffix == ".mo" else _read_po(path)
    return {key: message for key, message in entries if message.text and key.id}


def _read_mo(path: Path) -> Iterator[tuple[Key, Message]]:
    data = path.read_bytes()
    order = _MAGIC.get(data[:4])
    if order is None:
        raise ValueError(f"{path} is no .mo file: it begins with {data[:4]!r}")
    try:
        count, ids, texts = struct.unpack_from(f"{order}3I", data, 8)
        for index in range(count):
            strings = []
            for table in (ids, texts):
                length, start = struct.unpack_from(f"{order}2I", data, table + 8 * index)
                if start + length > len(data):
                    raise ValueError(f"message {index} ends past the file's {len(data)} bytes")
                strings.append(data[start : start + length].decode("utf-8"))
            context, _, named = strings[0].rpartition("\x04")
            yield from _forms(context, named.split("\0"), strings[1].split("\0"))
    except (struct.error, ValueError) as error:
        raise ValueError(f"{path} is damaged, or not UTF-8: {error}") from error


def _read_po(path: Path) -> Iterator[tuple[Key, Message]]:
    polib = require("polib", "corpora", f"reading {path.name}")
    try:
        entries = polib.pofile(str(path), encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no .po file in UTF-8: {error}") from error
    for entry in entries:
        if entry.fuzzy or entry.obsolete:
            continue
        ids = [entry.msgid] + ([entry.msgid_plural] if entry.msgid_plural else [])
        texts = (
            [entry.msgstr_plural[i] for i in sorted(entry.msgstr_plural)]
            if entry.msgid_plural
            else [entry.msgstr]
        )
        default = _DEFAULT.search(entry.comment or "")
        for key, message in _forms(entry.msgctxt or "", ids, texts):
            english = (
                default[1].replace('\\"', '"') if default and key.form == 0 else message.english
            )
            yield key, Message(english, message.text)


def _forms(context: str, ids: list[str], texts: list[str]) -> Iterator[tuple[Key, Message]]:
    """Yield a message and, if the language has as many forms as English, its plural.

    With another number of forms, none corresponds to the English plural.
    """
    if len(ids) == len(texts):
        for form, (english, text) in enumerate(zip(ids, texts)):
            yield Key(context, ids[0], form), Message(english, text)


def _has_polib() -> bool:
    try:
        require("polib", "corpora", "reading .po files")
    except ImportError:
        return False
    return True
