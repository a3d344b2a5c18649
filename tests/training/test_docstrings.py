# SPDX-License-Identifier: Apache-2.0
"""Summary pairs from docstrings: selection, exclusions, and errors of a package."""

from __future__ import annotations

import pytest

from training_tasks.data.docstrings import docstring_pairs, docstrings, summed_up

PROSE = (
    "The pages of the pool are looked at one after the other, and a free one is handed out to who"
    " asks first."
)
OTHER = (
    "Who has read all of the letters is asked to sort them by colour, and then to put each into a"
    " box of that colour."
)


def test_first_paragraph_is_the_summary_of_the_prose_before_sections():
    pair = summed_up(f"""Hand out a free :class:`~pool.Page`.

    {PROSE}

    It may be ``None``.

    Parameters
    ----------
    count : int
        How many.
    """)
    assert pair == (f"{PROSE} It may be None.", "Hand out a free pool.Page.")


@pytest.mark.parametrize(
    "section",
    ["Args:", ":param x: a number", ">>> f(1)", ".. note::", "Returns\n-------", "- a list"],
)
def test_sections_end_the_prose(section):
    assert summed_up(f"Hand out a page.\n\n{PROSE}\n\n{section}\n    else") == (
        PROSE,
        "Hand out a page.",
    )
    assert summed_up(f"Hand out a page.\n\n{section}\n    {PROSE}") == "no text, or a short one"


def test_dropped_docstrings_have_a_reason():
    assert summed_up("Hand out a page.") == "no text, or a short one"
    assert summed_up(f"Page.\n\n{PROSE}") == "a summary of other length"
    assert summed_up(f"The pages of the pool.\n\n{PROSE}") == "the text contains the summary"
    assert summed_up(f"----\n\n{PROSE}") == "no summary"
    assert len(summed_up("Hand out a page.\n\n" + "word and more " * 60).source.split()) == 60, (
        "the rest is left out"
    )


def test_files_are_parsed_and_never_imported(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        '"""Module."""\nraise SystemExit\nclass A:\n    """Class."""\n    async def f(self):\n     '
        '   """Method."""\n'
    )
    assert sorted(docstrings(path)) == ["Class.", "Method.", "Module."]
    path.write_text("def (")
    assert list(docstrings(path)) == [] == list(docstrings(tmp_path / "none.py"))


def test_packages_give_pairs_with_their_licenses(install):
    code = (
        f'def f():\n    """Hand out a page.\n\n    {PROSE}\n    """\ndef g():\n    """Sort by'
        ' colour.\n\n    {}\n    """\n'
    )
    install("onepackage", {"one.py": code.format(OTHER).encode(), "data.txt": b"no python"})
    again = {"two.py": code.format(OTHER.upper()), "three.py": code.format(PROSE[:90])}
    install("twopackage", {name: text.encode() for name, text in again.items()})
    found = docstring_pairs(["onepackage", "twopackage"])
    assert found.pairs == [
        (PROSE, "Hand out a page."),
        (OTHER, "Sort by colour."),
        (PROSE[:90], "Sort by colour."),
    ]
    assert found.packages == [
        "onepackage 1.2, licence MIT: 2 pairs",
        "twopackage 1.2, licence MIT: 1 pairs",
    ]
    assert found.left_out == {"a duplicate": 3}
    install("threepackage", {"three.py": b"x = 1"})
    for packages, output in [
        (["nosuchpackage"], "no such package is installed; pip install nosuchpackage"),
        (
            ["threepackage"],
            "docstrings:threepackage: no docstring with a summary and a text of 12 words",
        ),
        ([], "names no package"),
    ]:
        with pytest.raises(ValueError, match=output):
            docstring_pairs(packages)
