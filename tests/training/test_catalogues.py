# SPDX-License-Identifier: Apache-2.0
"""Sentence pairs from gettext catalogues of installed packages equal the standard library's."""

from __future__ import annotations

import gettext
import importlib.util
import json
import sys

import pytest
from train import main

from pytransformer.cli import OK, USAGE
from pytransformer.training import Pair, split_pairs, translation_scores
from pytransformer.training.quality import from_memory
from training_tasks.data.catalogues import Key, catalogue_pairs, read_catalogue, speaks
from training_tasks.data.cleaning import clean_pair, sentence_key

PT = {
    "Save": "Salvar",
    "month\x04May": "maio",
    "%(count)d page\0%(count)d pages": "%(count)d página\0%(count)d páginas",
    'Read the <a href="%(url)s">manual</a>,\nplease.': (
        'Leia o <a href="%(url)s">manual</a>, por favor.'
    ),
    "label_title": "Título",
    "URL": "URL",
    "Hello %s": "Olá",
}


@pytest.mark.parametrize("order", "<>")
def test_catalogues_equal_gettext(mo, tmp_path, order):
    path = tmp_path / "some.mo"
    path.write_bytes(mo(PT, order))
    with open(path, "rb") as file:
        theirs = gettext.GNUTranslations(file)
    ours = read_catalogue(path)
    assert len(ours) == 8, "seven messages, of which one has a plural; the header is none"
    for (context, message, form), (english, text) in ours.items():
        if message.startswith("%(count)d"):
            expected = theirs.ngettext("%(count)d page", "%(count)d pages", 1 + form)
            assert english == ("%(count)d page", "%(count)d pages")[form]
        else:
            expected, english_wanted = (
                theirs.pgettext(context, message) if context else theirs.gettext(message),
                message,
            )
            assert english == english_wanted and form == 0
        assert text == expected
    assert ours[Key("month", "May", 0)].text == "maio"


def test_every_damage_is_named(mo, tmp_path):
    whole, path = mo(PT), tmp_path / "some.mo"
    for content, output in (
        (b"no catalogue", "is no .mo file"),
        (whole[:40], "is damaged"),
        (whole[:-20], "ends past the file's"),
        (whole.replace("página".encode(), b"p\xe1gina "), "not UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=output):
            read_catalogue(path)


def test_installed_packages_give_pairs(mo, install):
    install(
        "fakeone",
        {
            "locale/pt_BR/LC_MESSAGES/app.mo": mo(PT),
            "locale/de/LC_MESSAGES/app.mo": mo({"Save": "Sichern"}),
        },
    )
    install(
        "faketwo",
        {"l/pt/LC_MESSAGES/x.mo": mo({"Save": "Guardar", "Open": "Abrir"})},
        "Classifier: License :: OSI Approved :: BSD License",
    )
    corpus = catalogue_pairs(["fakeone", "faketwo"], "pt", "en")
    assert sorted(corpus.pairs) == sorted([
        Pair("Salvar", "Save"), Pair("maio", "May"), Pair("{0} página", "{0} page"),
        Pair("{0} páginas", "{0} pages"),
        Pair("Leia o manual, por favor.", "Read the manual, please."), Pair("Guardar", "Save"),
        Pair("Abrir", "Open"),
    ])  # fmt: skip
    assert corpus.left_out == {
        "untranslated": 1,
        "other placeholders": 1,
    }, "URL, Hello; of label_title no English is known"
    assert corpus.packages == [
        "fakeone 1.2, licence MIT: 5 pairs",
        "faketwo 1.2, licence BSD License: 2 pairs",
    ]
    assert catalogue_pairs(["fakeone"], "en", "de").pairs == [Pair("Save", "Sichern")]
    assert catalogue_pairs(["fakeone"], "de", "pt").pairs == [Pair("Sichern", "Salvar")], (
        "both by way of the message"
    )


def test_english_catalogue_translates_ids(mo, install):
    english = mo({"label_title": "Title"})
    install("fakeone", {"l/pt/LC_MESSAGES/x.mo": mo(PT), "l/en/LC_MESSAGES/x.mo": english})
    assert Pair("Título", "Title") in catalogue_pairs(["fakeone"], "pt", "en").pairs


PO = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

#. Default: "The \\"title\\""
msgid "label_title"
msgstr "O \\"título\\""

#, fuzzy
msgid "Open"
msgstr "Fechar"

msgctxt "month"
msgid "May"
msgstr "maio"
"""


def test_po_files_require_polib(install, monkeypatch):
    install("fakeone", {"l/pt/LC_MESSAGES/x.po": PO.encode()})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "polib", None)
        with pytest.raises(
            ImportError,
            match=(
                r"reading the \.po files of fakeone needs polib, .*pytransformer-kernels\[corpora\]"
            ),
        ):
            catalogue_pairs(["fakeone"], "pt", "en")
    if importlib.util.find_spec("polib") is None:
        pytest.skip("needs polib (the extra corpora)")
    assert sorted(catalogue_pairs(["fakeone"], "pt", "en").pairs) == [
        Pair('O "título"', 'The "title"'),
        Pair("maio", "May"),
    ]


def test_unreadable_files_are_named(mo, install):
    install("fakeone", {"l/de/LC_MESSAGES/x.mo": mo({"Save": "Sichern"})})
    install("fakeempty", {"readme.txt": b""})
    for packages, languages, output in (
        (
            ["nosuchpackage"],
            ("pt", "en"),
            "no such package is installed; pip install nosuchpackage",
        ),
        (["fakeempty"], ("pt", "en"), "it has no gettext catalogue"),
        (["fakeone"], ("pt", "en"), "no pair of pt and en in fakeone 1.2"),
        (["fakeone"], ("de", "DE"), "both 'de'; expected two languages"),
    ):
        with pytest.raises(ValueError, match=output):
            catalogue_pairs(packages, *languages)


@pytest.mark.parametrize(
    ("pair", "wanted"),
    [
        (("Apagar  «%s»?\n", "Delete “%s”?"), Pair("Apagar «{0}»?", "Delete “{0}”?")),
        (("{b} de ${a}", "${a} of {b}"), Pair("{0} de {1}", "{1} of {0}")),
        (("%(n).1f MB livres", "%(n).1f MB free"), Pair("{0} MB livres", "{0} MB free")),
        (("100% dos sítios", "100% of sites"), Pair("100% dos sítios", "100% of sites")),
        (("%d%% de %s", "%d%% of %s"), Pair("{0}% de {1}", "{0}% of {1}")),
        (("100%% certo", "100%% sure"), Pair("100% certo", "100% sure")),
        (("Sim &amp; não", "Yes &amp; no"), Pair("Sim & não", "Yes & no")),
        (("<b>Sim</b>", "Yes"), "other markup"),
        (("Olá %s", "Hello"), "other placeholders"),
        (("Django", "Django"), "untranslated"),
        (("%s: %s", "%s - %s"), "no word"),
        ((" ".join(["um"] * 61), "a"), "no word"),
        ((" ".join(["um"] * 61), "one"), "too long"),
        (("日", "day"), Pair("日", "day")),
    ],
)
def test_pairs_are_cleaned_or_dropped_with_a_reason(pair, wanted):
    assert clean_pair(*pair) == wanted


def test_language_codes_match_their_variants():
    assert speaks("pt-BR", "pt") and speaks("pt_br", "pt_BR") and speaks("pt", "pt")
    assert not speaks("pt", "pt_BR") and not speaks("pts", "pt") and not speaks("de", "pt")


def test_held_out_texts_do_not_occur_in_training():
    """Variants of a language translate one English text, and one text has several English ones."""
    words = [2 * letter for letter in "abcdefghijklmnopqrstuvwxyz"]
    pairs = [
        Pair(f"{verb} {word}", f"save {word}") for word in words for verb in ("salvar", "guardar")
    ]
    pairs += [Pair(f"Salvar {word}!", f"keep {word}") for word in words]
    train, held_out = split_pairs(pairs, every=3, key=sentence_key)
    assert len(train) + len(held_out) == len(pairs) and train and held_out
    for side in (0, 1):
        assert not {sentence_key(p[side]) for p in train} & {
            sentence_key(p[side]) for p in held_out
        }
    plain = [{p.target for p in part} for part in split_pairs(pairs, every=3)]
    assert plain[0] & plain[1], "without a key they are"


def test_scores_equal_sacrebleu():
    pytest.importorskip("sacrebleu", reason="needs sacrebleu (the extra corpora)")
    expected = ["the cat sat on the mat .", "there is a black house here ."]
    assert (
        translation_scores(expected, expected)["bleu"]
        == translation_scores(expected, expected)["chrf"]
        == 100
    )
    output = ["the cat sat on a mat .", "there is the black house here ."]
    scores = translation_scores(output, expected)
    # Shares of correct n-grams: 12/14, 8/12, 4/10, 2/8; the score is their geometric mean, without
    # a penalty for equal lengths.
    assert scores["bleu"] == pytest.approx(
        100 * (12 / 14 * 8 / 12 * 4 / 10 * 2 / 8) ** 0.25, abs=0.01
    )
    assert 50 < scores["chrf"] < 100 and "version" in scores["chrf_signature"]
    with pytest.raises(ValueError, match="got 1 and 2"):
        translation_scores(output[:1], expected)


def test_memory_returns_the_most_similar_sentence():
    memory = [
        Pair("abrir a página", "open the page"),
        Pair("apagar a página", "delete the page"),
        Pair("a a a", "the"),
    ]
    texts = ["Apagar: página!", "a", "abrir tudo", "nada"]
    assert from_memory(memory, texts) == ["delete the page", "the", "open the page", "nada"]


def test_missing_sacrebleu_raises_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(
        ImportError, match=r"BLEU and chrF needs sacrebleu, .*pytransformer-kernels\[corpora\]"
    ):
        translation_scores(["a"], ["a"])


def test_training_runs_on_a_package(mo, install, tmp_path, capsys):
    letters = "abcdefghij"
    messages = {
        f"{x}{x} {y}{y} {z}{z}": f"{z}{z} {y}{y} {x}{x}"
        for x in letters
        for y in letters
        for z in "kl"
    }
    install("fakeone", {"l/de/LC_MESSAGES/x.mo": mo(messages)})
    small = [
        "--layers",
        "1",
        "--width",
        "16",
        "--batch",
        "8",
        "--vocabulary",
        "100",
        "--device",
        "cpu",
        "--steps",
        "2",
    ]
    command = ["translate", *small, "--out", str(tmp_path / "out")]
    assert main([*command, "--data", "gettext:fakeone", "--from", "de", "--to", "en"]) == OK
    output = capsys.readouterr().out
    assert "fakeone 1.2, licence MIT: 200 pairs" in output and "left out: nothing" in output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["held_out"] > 0
    if importlib.util.find_spec("sacrebleu") is None:
        assert "no BLEU and chrF: BLEU and chrF needs sacrebleu" in output and "bleu" not in report
    else:
        assert {"bleu", "chrf", "memory_bleu", "memory_chrf"} <= report.keys() and "BLEU " in output
    for data, more, expected in (
        ("gettext:", [], "names no package; expected gettext:PACKAGE"),
        ("gettext:nosuchpackage", [], "no such package is installed"),
        ("gettext:fakeone", ["--from", "pt"], "no pair of pt and en"),
        (str(tmp_path / "some.tsv"), ["--from", "pt"], "the columns of a file are what they are"),
    ):
        other = [*command[:-1], str(tmp_path / "other")]
        assert main([*other, "--data", data, *more]) == USAGE
        assert expected in capsys.readouterr().err
