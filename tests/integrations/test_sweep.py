# SPDX-License-Identifier: Apache-2.0
"""The sweep over transformers' architectures: a sample, and planted faults that it must detect.

`make test-full` runs all architectures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.sweep import report

# One per way of passing masks and attention: mechanisms that were wrong in some model.
SAMPLE = {
    "causality from the mask function, plain": ("llama", "gpt2", "opt"),
    "causality and a sliding window": ("mistral", "gemma3_text", "qwen3_next"),
    "bidirectional": ("bert", "modernbert", "xlm-roberta"),
    "no mask and a module without is_causal": (
        "align_text_model",
        "clap_text_model",
        "splinter",
        "bridgetower",
    ),
    "no mask and a module whose is_causal is untrue": (
        "nllb-moe",
        "pegasus_x",
        "bigbird_pegasus",
        "umt5",
    ),
    "adds the mask by itself": (
        "bloom",
        "blip",
        "convbert",
        "codegen",
        "mpnet",
        "xglm",
        "roformer",
        "trocr",
        "squeezebert",
    ),
    "adds the mask by itself where padded": ("canine", "lilt", "mpt", "visual_bert"),
    "a table of its own by the implementation's name": (
        "falcon",
        "gptj",
        "gpt_neo",
        "data2vec-vision",
    ),
    "a selection of keys by keyword": ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"),
    "sinks": ("gpt_oss",),
    "works on its mask": ("doge", "deepseek_v4"),
    "hands on what its caller gave": ("parakeet_ctc", "llava_onevision", "lfm3_vl"),
    "a bias of positions": ("t5", "mt5"),
    "chunks and blocks of its own, which convert knows": ("longformer", "led", "big_bird"),
    "what is run most": ("qwen3", "phi3", "mixtral", "gemma3", "siglip", "dinov2"),
    "text beside images or sound": ("clip", "llava", "whisper"),
}
NAN = float("nan")
TYPES = tuple(name for names in SAMPLE.values() for name in names)


@pytest.fixture(autouse=True)
def _quiet(hugging_face: Any, one_thread: None) -> None:
    from support.sweep.run import quiet

    quiet()


def rows(model_type: str) -> report.Rows:
    from support.sweep import compare

    return report.clean(compare.rows(model_type))


def wrong(rows: report.Rows) -> set[str]:
    return {name for name, row in rows.items() if row["verdict"] == "wrong"}


def committed_for(version: str) -> report.Rows:
    """Return the committed rows; none for another version of transformers.

    Another version may differ but must not be wrong.
    """
    results = report.load(report.place(version))
    return results["rows"] if results["transformers"] == version else {}


@pytest.mark.parametrize("path", [report.RESULTS, report.OLDER], ids=lambda path: path.stem)
def test_no_architecture_is_wrong(path: Path) -> None:
    assert not wrong(report.load(path)["rows"])


def test_results_file_depends_on_the_version() -> None:
    assert report.place(report.load()["transformers"]) == report.place("99.0.0") == report.RESULTS
    assert report.place(report.load(report.OLDER)["transformers"]) == report.OLDER


@pytest.mark.parametrize(
    ("ours", "sdpa", "says"),
    [
        ((1.0, 2.0), (1.0, 2.0), "same"),
        ((1.0, 5.0), (1.0, 5.0), "as sdpa"),
        ((1.0, NAN), (1.0, NAN), "as sdpa"),
        ((1.0, NAN), (NAN, NAN), "as sdpa"),  # an exemption of ours is one of eager code
        ((3.0, NAN), (NAN, NAN), "differs"),
        ((1.0, NAN), (1.0, 2.0), "differs"),
        ((1.0, NAN), (1.0, 5.0), "differs"),
        ((NAN, 2.0), (1.0, NAN), "differs"),
        ((1.0, 2.0), (1.0, NAN), "same"),
    ],
)
def test_as_sdpa_rows_are_nowhere_worse_than_sdpa(
    ours: tuple[float, float], sdpa: tuple[float, float], says: str
) -> None:
    from support.sweep.compare import Outcome, judge

    eager, mine, theirs = (
        Outcome({"x": torch.ones(2)}, {"w": torch.tensor(w)}) for w in ((1.0, 2.0), ours, sdpa)
    )
    assert judge(mine, eager, lambda: theirs, dict, padded=True).partition(":")[0] == says


def test_as_sdpa_needs_padding_or_non_finite_eager_results() -> None:
    """In other cases sdpa's error counts as wrong."""
    from support.sweep.compare import AS_SDPA, Outcome, judge

    eager, off, lost = (
        Outcome({"x": torch.tensor(values)}) for values in ((1.0, 2.0), (1.0, 5.0), (1.0, NAN))
    )
    assert judge(off, eager, lambda: off, dict, padded=True) == AS_SDPA
    assert judge(off, eager, lambda: off, dict, padded=False).startswith("differs")
    assert judge(off, lost, lambda: off, dict, padded=False) == AS_SDPA


@pytest.mark.unpoisoned
def test_uninitialized_parameters_are_filled() -> None:
    """Every build gets the same values, never the contents of memory."""
    from support.sweep.subjects import nan_where_uninitialised, stirred

    def build() -> torch.nn.Module:
        with nan_where_uninitialised():
            model = torch.nn.Module()
            model.experts = torch.nn.Parameter(torch.empty(40, 30))
        assert model.experts.isnan().all()
        return stirred(model)

    first, second = build().experts, build().experts
    assert first.isfinite().all() and first.std() > 0.05 and torch.equal(first, second)
    assert not torch.are_deterministic_algorithms_enabled()


def test_compatibility_page_matches_the_results() -> None:
    text, rows = report.COMPATIBILITY.read_text(), report.load()["rows"]
    assert report.with_table(text, rows) == text, (
        "run: PYTHONPATH=tests/support python -m support.sweep --write"
    )
    families = {name.partition("/")[0] for name in rows}
    assert set(report.FAMILIES) <= families


def test_architectures_file_matches_the_results() -> None:
    assert report.DOC.read_text() == report.page(report.load(), report.load(report.OLDER)), (
        "run: PYTHONPATH=tests/support python -m support.sweep --write"
    )


@pytest.mark.unpoisoned
@pytest.mark.falls_back
@pytest.mark.parametrize("model_type", TYPES)
def test_sampled_architectures_match_the_results(hugging_face: Any, model_type: str) -> None:
    from support.sweep.subjects import model_types

    if model_type not in model_types():
        pytest.skip(f"transformers {hugging_face.__version__} has no model type {model_type}")
    committed, found = committed_for(hugging_face.__version__), rows(model_type)
    for name, row in found.items():
        assert row["verdict"] not in ("wrong", "not built"), f"{name}: {row}"
        assert not committed or report.kinds(row) == report.kinds(committed[name]), name


@pytest.mark.slow
@pytest.mark.unpoisoned
@pytest.mark.parametrize("letter", sorted({name[0] for name in report.load()["rows"]}))
def test_all_architectures_match_the_results(
    hugging_face: Any, tmp_path: Path, letter: str
) -> None:
    from support.sweep.subjects import model_types

    types = [model_type for model_type in model_types() if model_type.startswith(letter)]
    if not types:  # the command would read that as "all"
        pytest.skip(f"transformers {hugging_face.__version__} has no model type in {letter}")
    committed = {
        name: row
        for name, row in committed_for(hugging_face.__version__).items()
        if name.startswith(letter)
    }
    command = [
        sys.executable,
        "-m",
        "support.sweep",
        *types,
        "--jobs",
        "2",
        "--json",
        str(tmp_path / "rows.json"),
    ]
    subprocess.run(
        command, stdout=subprocess.DEVNULL
    )  # its exit code reports wrong rows, which the assertion below names
    found = json.loads((tmp_path / "rows.json").read_text())
    assert not wrong(found)
    # The libraries here may build some that the committed run could not.
    built = {name for name, row in committed.items() if row["verdict"] != "not built"}
    assert {name: report.kinds(found[name]) for name in built} == {
        name: report.kinds(committed[name]) for name in built
    }


def test_interrupted_runs_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Existing rows are not computed again; new rows are written immediately."""
    from support.sweep import __main__ as command

    file, row = tmp_path / "rows.json", {"verdict": "ours"}
    file.write_text(json.dumps({"bert/BertForMaskedLM": row}))

    def cut(types: list[str], jobs: int) -> Any:
        assert types == ["gpt2", "llama"]
        yield "gpt2", {"gpt2/GPT2LMHeadModel": row}
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "sweep", cut)
    monkeypatch.setattr(
        sys, "argv", ["sweep", "bert", "gpt2", "llama", "--json", str(file), "--resume"]
    )
    with pytest.raises(KeyboardInterrupt):
        command.main()
    assert json.loads(file.read_text()) == {
        "bert/BertForMaskedLM": row,
        "gpt2/GPT2LMHeadModel": row,
    }
    assert list(tmp_path.iterdir()) == [file]


# ---- faults in the interface that the sample must detect


def lost_causality(mask: Callable[..., Any], attention: Callable[..., Any]) -> tuple[Any, Any]:
    from transformers.masking_utils import bidirectional_mask_function

    return lambda *a, **k: mask(
        *a,
        **{**k, "mask_function": bidirectional_mask_function, "allow_is_bidirectional_skip": True},
    ), attention


def dropped_keyword(name: str) -> Callable[..., tuple[Any, Any]]:
    def fault(mask: Callable[..., Any], attention: Callable[..., Any]) -> tuple[Any, Any]:
        return mask, lambda *a, **k: attention(*a, **{**k, name: None})

    return fault


def padding_unseen(mask: Callable[..., Any], attention: Callable[..., Any]) -> tuple[Any, Any]:
    return lambda *a, attention_mask=None, **k: mask(*a, **k), attention


def padding_shifted(mask: Callable[..., Any], attention: Callable[..., Any]) -> tuple[Any, Any]:
    def shifted(*a: Any, attention_mask: torch.Tensor | None = None, **k: Any) -> Any:
        return mask(
            *a, attention_mask=None if attention_mask is None else attention_mask.roll(1, 1), **k
        )

    return shifted, attention


def window_read_as_causality(
    mask: Callable[..., Any], attention: Callable[..., Any]
) -> tuple[Any, Any]:
    from transformers.masking_utils import causal_mask_function

    return lambda *a, **k: mask(*a, **{**k, "mask_function": causal_mask_function}), attention


FAULTS = {
    "lost causality": (lost_causality, "llama"),
    "a window read as causality": (window_read_as_causality, "mistral"),
    "padding unseen": (padding_unseen, "bert"),
    "padding shifted": (padding_shifted, "gpt2"),
    "scaling dropped": (dropped_keyword("scaling"), "t5"),
    "softcap dropped": (dropped_keyword("softcap"), "gemma2"),
    "sinks dropped": (dropped_keyword("s_aux"), "gpt_oss"),
    "a selection of keys dropped": (dropped_keyword("indices"), "deepseek_v32"),
    "position bias dropped": (dropped_keyword("position_bias"), "t5"),
}


@pytest.mark.unpoisoned
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_detected(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    plant, model_type = FAULTS[fault]
    masks, attentions = AttentionMaskInterface._global_mapping, AttentionInterface._global_mapping
    mask, attention = plant(masks["pytransformer"], attentions["pytransformer"])
    monkeypatch.setitem(masks, "pytransformer", mask)
    monkeypatch.setitem(attentions, "pytransformer", attention)
    assert {row["verdict"] for row in rows(model_type).values()} == {"wrong"}
