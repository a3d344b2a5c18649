# SPDX-License-Identifier: Apache-2.0
"""Properties of every model: gradients, presets, caches, masks and errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pytransformer import models, nn
from support.models import AUTOCAST, assert_same_logits
from support.small_models import CONFIGS, build, inputs

DECODERS = [
    "GPT",
    "GPT-alibi",
    "Transformer",
    "Transformer-pre",
    "Transformer-wide",
    "T5",
    "T5-v1.1",
]


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_reach_every_parameter(name: str):
    model = build(name)
    model.train()
    model(**inputs(name)).loss.backward()
    for parameter, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), parameter
        if "qkv.bias" in parameter:  # the key bias has no effect on a softmax
            width = p.numel() // 3
            assert p.grad[:width].abs().sum() > 0 and p.grad[2 * width :].abs().sum() > 0, parameter
        elif not any(
            part in parameter for part in ("places", "positions", "embedding", "segments")
        ):
            assert p.grad.abs().sum() > 0, parameter
        else:
            assert (p.grad.abs().sum(-1) > 0).any(), parameter


@pytest.mark.parametrize("name", CONFIGS)
def test_dropout_acts_only_in_training(name: str):
    if "dropout" not in {f.name for f in dataclasses.fields(CONFIGS[name])}:
        return
    model = build(name, dropout=0.3)
    given = inputs(name)
    model.train()
    assert not torch.equal(model(**given).last_hidden_state, model(**given).last_hidden_state)
    model.eval()
    assert torch.equal(model(**given).last_hidden_state, model(**given).last_hidden_state)


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_close_to_float32(name: str):
    model = build(name).to(torch.bfloat16).eval()
    given = {
        k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in inputs(name).items()
    }
    out = model(**given)
    assert out.logits.dtype == torch.bfloat16 and out.logits.isfinite().all()
    assert out.loss.dtype == torch.float32 and out.loss.isfinite()


@pytest.mark.parametrize("name", CONFIGS)
def test_training_steps_run_under_autocast(name: str):
    model = build(name).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs(name)).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all()
        for p in model.parameters()
    )
    with torch.no_grad():
        plain = model.eval()(**inputs(name)).loss
        with torch.autocast("cpu", torch.bfloat16):
            cast = model(**inputs(name)).loss
    assert (cast - plain).abs() <= AUTOCAST * plain


@pytest.mark.parametrize(
    "name", [n for n in CONFIGS if "attention_mask" in inputs(n) and n != "FNet"]
)
def test_padding_has_no_effect_and_lengths_equal_masks(name: str):
    model, given = build(name).eval(), inputs(name)
    given = {
        k: v
        for k, v in given.items()
        if k in ("input_ids", "input_features", "attention_mask", "token_type_ids")
    }
    decoder = (
        {"decoder_input_ids": torch.randint(3, 29, (3, 4))}
        if name.split("-")[0] in ("Transformer", "T5")
        else {}
    )
    mask = given["attention_mask"].bool()
    out = model(**given, **decoder).last_hidden_state
    by_lengths = model(**(given | {"attention_mask": mask.sum(1)}), **decoder).last_hidden_state
    key = "input_features" if "input_features" in given else "input_ids"
    given[key] = torch.where(
        mask if given[key].dim() == 2 else mask[..., None],
        given[key],
        torch.full_like(given[key], 2),
    )
    polluted = model(**given, **decoder).last_hidden_state
    chosen = slice(None) if decoder else mask
    if name == "Conformer-ctc":
        chosen = model.subsampling.kept(mask)
    assert_same_logits(by_lengths[chosen], out[chosen])
    assert_same_logits(polluted[chosen], out[chosen])


# ---- caches


@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_equal_with_and_without_cache(name: str, padding: str):
    model = build(name).eval()
    source, ids = torch.randint(3, 29, (3, 8)), torch.randint(3, 29, (3, 9))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :2] = mask[2, :4] = 0
    places = nn.position_ids(mask, 9)
    cache = model.make_cache(10)
    seq2seq = not name.startswith("GPT")

    def run(start: int, end: int, cache: nn.KeyValueCache | None) -> torch.Tensor:
        at = places[:, start:end]
        if name.startswith("GPT"):
            out = model(ids[:, start:end], mask[:, :end], position_ids=at, past_key_values=cache)
        else:
            memory = (
                model.encode(source)
                if cache is None or cache.length == 0
                else torch.zeros(3, 8, 16)
            )
            at = {} if name.startswith("T5") else {"decoder_position_ids": at}
            out = model(
                decoder_input_ids=ids[:, start:end], decoder_attention_mask=mask[:, :end],
                encoder_outputs=memory,
                past_key_values=cache, **at,
            )  # fmt: skip
            assert out.encoder_last_hidden_state is memory
        assert out.past_key_values is cache
        return out.logits

    whole = run(0, 9, None)
    pieces = [run(a, b, cache) for a, b in ((0, 5), (5, 6), (6, 7), (7, 9))]
    real = mask.bool()
    assert_same_logits(torch.cat(pieces, 1)[real], whole[real])
    assert cache.length == 9
    assert all((layer.cross is not None) == seq2seq for layer in cache.layers)


@torch.no_grad()
def test_left_padding_with_position_ids_has_no_effect():
    model, ids = build("GPT").eval(), torch.randint(3, 29, (1, 6))
    padded, mask = torch.nn.functional.pad(ids, (3, 0)), torch.tensor([[0] * 3 + [1] * 6])
    out = model(padded, mask, position_ids=nn.position_ids(mask, 9)).logits[:, 3:]
    assert_same_logits(out, model(ids).logits)


@torch.no_grad()
def test_prefix_is_bidirectional_and_causal_afterwards():
    model, ids = build("GPT").eval(), torch.randint(3, 29, (1, 8))
    prefix = torch.tensor([4])
    plain, seen = model(ids).logits, model(ids, prefix_lengths=prefix).logits
    assert (seen[:, 0] - plain[:, 0]).abs().max() > 1e-4
    for changed, same in ((3, 0), (6, 6)):
        other = ids.clone()
        other[0, changed] = (ids[0, changed] + 1) % 29
        moved = (model(other, prefix_lengths=prefix).logits - seen).abs().amax(-1)[0]
        assert (moved[same:changed] > 0).all() and (moved[: same if changed == 6 else 0] == 0).all()


@torch.no_grad()
def test_logits_to_keep_selects_the_last_positions():
    model, ids = build("GPT").eval(), torch.randint(3, 29, (2, 8))
    assert_same_logits(model(ids, logits_to_keep=2).logits, model(ids).logits[:, -2:])


def test_windows_and_alibi_support_longer_sequences():
    model = build("GPT-alibi").eval()
    assert model(torch.randint(3, 29, (1, 40))).logits.shape == (1, 40, 31)
    ids = torch.randint(3, 29, (1, 12))
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % 29
    moved = (model(other).logits - model(ids).logits).abs().amax(-1)[0]
    assert (moved[:9] > 0).all() and (moved[9:] == 0).all()  # two layers reach 2 * 4 tokens back


# ---- losses


def test_gpt_loss_predicts_the_next_token():
    model, given = build("GPT").eval(), inputs("GPT")
    out = model(**given)
    expected = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten()
    )
    assert_same_logits(out.loss, expected)


def test_label_smoothing_acts_only_in_training():
    model, given = build("Transformer", dropout=0.0).train(), inputs("Transformer")
    for training, smoothing in ((True, 0.1), (False, 0.0)):
        out = model.train(training)(**given)
        expected = torch.nn.functional.cross_entropy(
            out.logits.flatten(0, 1), given["labels"].flatten(), label_smoothing=smoothing
        )
        assert_same_logits(out.loss, expected)


def test_models_without_mixture_layers_have_no_balance_loss():
    """Every second layer is a mixture, so one layer per stack has none, whatever experts is."""
    given = inputs("Transformer-pre")
    losses = [
        build("Transformer-pre", experts=n, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0)
        .train()(**given)
        .loss
        for n in ({"num_experts": 3}, None)
    ]
    assert torch.equal(*losses)


def test_decoder_inputs_are_shifted_labels():
    model, given = (
        build("Transformer", start_token_id=5, pad_token_id=7).eval(),
        inputs("Transformer"),
    )
    given["labels"][0, 4:] = -100
    shifted = torch.cat(
        [
            torch.full((3, 1), 5),
            given["labels"][:, :-1].masked_fill(given["labels"][:, :-1] == -100, 7),
        ],
        1,
    )
    expected = model(**given, decoder_input_ids=shifted)
    out = model(**given)
    assert torch.equal(out.logits, expected.logits) and torch.equal(out.loss, expected.loss)


def test_boundary_loss_depends_on_bounds_and_position_only():
    """SpanBERT predicts y_i from the tokens around the span and i's position in it.

    The expected value uses the head's layers.
    """
    model, given = build("BERT").eval(), inputs("BERT")
    hidden, head = torch.randn(3, 9, 16), model.boundary
    masked = given["labels"] != -100
    predicted = head.predicted(hidden, masked, given["span_bounds"])
    expected = [
        head.second(head.first(torch.cat([hidden[b, 0], hidden[b, 3], head.places.weight[i - 1]])))
        for b in range(3) for i in (1, 2)
    ]  # fmt: skip
    assert_same_logits(predicted, torch.stack(expected))
    logits = predicted @ model.embedding.weight.T + head.output.bias
    expected_loss = torch.nn.functional.cross_entropy(logits, given["labels"][masked])
    assert_same_logits(head.loss(hidden, given["labels"], given["span_bounds"]), expected_loss)
    for bounds in ([1, 3], [0, 1]):
        with pytest.raises(ValueError, match="lie between its bounds"):
            head.predicted(hidden, masked, torch.tensor(bounds).expand(3, 9, 2))


def test_bert_loss_is_the_sum_of_its_heads():
    model, given = build("BERT").eval(), inputs("BERT")
    total = model(**given).loss
    trunk = {k: given[k] for k in ("input_ids", "attention_mask", "token_type_ids")}
    out = model(**trunk)
    masked = given["labels"] != -100
    mlm = torch.nn.functional.cross_entropy(out.logits[masked], given["labels"][masked])
    nsp = torch.nn.functional.cross_entropy(out.next_sentence_logits, given["next_sentence_label"])
    boundary = model.boundary.loss(out.last_hidden_state, given["labels"], given["span_bounds"])
    assert_same_logits(total, mlm + nsp + boundary)


def test_fine_tuning_loads_the_trunk():
    model = build("BERT")
    tuned = model.with_heads("classification", num_labels=5)
    assert (
        torch.equal(tuned.embedding.weight, model.embedding.weight)
        and tuned.embedding is not model.embedding
    )
    assert tuned(torch.randint(3, 29, (2, 6)), labels=torch.tensor([4, 0])).logits.shape == (2, 5)


# ---- presets

SIZES = {  # published sizes in millions
    ("BERT", "base"): 110, ("BERT", "large"): 336, ("ViT", "B/16"): 86.6, ("ViT", "L/16"): 304.3,
    ("ViT", "H/14"): 632,
    ("GPT", "base"): 124.4, ("GPT", "xl"): 1557.6, ("T5", "base"): 222.9, ("T5", "large"): 737.7,
    ("T5", "v1.1-base"): 247.6,
    ("Transformer", "base"): 63, ("Transformer", "big"): 214, ("Mixer", "B/16"): 59.9,
    ("Mixer", "L/16"): 208.2,
    ("FNet", "base"): 83.5, ("Transformer", "notes-small"): 4.64,
}  # fmt: skip


@pytest.mark.unpoisoned  # nothing is allocated on meta
@pytest.mark.parametrize(("name", "preset"), SIZES)
def test_presets_have_the_published_sizes(name: str, preset: str):
    with torch.device("meta"):
        model = getattr(models, name).from_preset(preset)
    assert model.num_parameters() / 1e6 == pytest.approx(SIZES[name, preset], rel=0.005)


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("preset", "published", "units"),
    [("small", 10.3, 320), ("base", 30.7, 640), ("large", 118.8, 640)],
)
def test_conformer_presets_have_the_published_encoder_sizes(
    preset: str, published: float, units: int
):
    """Gulati et al. 2020, table 1, list encoder and decoder.

    The decoder is an LSTM of so many units, the embedding and the joint network.
    """
    with torch.device("meta"):
        ours = models.Conformer.from_preset(preset).num_parameters() / 1e6
    without_lstm = published - 4 * units * 2 * units / 1e6
    assert without_lstm - 0.85 < ours < without_lstm, (
        "what is left for the embedding and the joint network"
    )


@pytest.mark.unpoisoned
def test_every_preset_builds_and_changes():
    for name in models.__all__:
        model = getattr(models, name)
        if (
            isinstance(model, type)
            and issubclass(model, models.Model)
            and model is not models.Model
        ):
            for preset in model.PRESETS:
                with torch.device("meta"):
                    assert model.from_preset(preset).config == model.PRESETS[preset]
    with torch.device("meta"):
        assert models.GPT.from_preset("base", num_layers=1).config.num_layers == 1


# ---- errors


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="GPT has no preset 'huge'; it has 'base', 'medium'"):
        models.GPT.from_preset("huge")
    with pytest.raises(TypeError, match="no field layers; it has"):
        models.GPT.from_preset("base", layers=3)
    with pytest.raises(TypeError, match="made from a GPTConfig, got BERTConfig"):
        models.GPT(CONFIGS["BERT"])
    for name, changes in (
        ("GPT", {"positions": "none"}),
        ("Transformer", {"norm": "middle"}),
        ("Transformer", {"positions": "none"}),
        ("BERT", {"heads": ("mlm", "poem")}),
        ("BERT", {"pooler": False}),
    ):
        with pytest.raises(ValueError):
            build(name, **changes)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIGS["GPT"].num_layers = 3


@pytest.mark.parametrize("name", ["GPT", "BERT", "FNet", "Transformer", "Transformer-pre"])
def test_sequences_longer_than_the_positions_are_refused(name: str):
    ids = torch.randint(3, 29, (1, 13))
    with pytest.raises(ValueError, match="13 tokens is longer than the model's 12 positions"):
        build(name)(ids)


@torch.no_grad()
@pytest.mark.unpoisoned
@pytest.mark.parametrize("name", ["Conformer-ctc", "Mixer-separable"])
def test_models_without_a_cache_compile_to_one_graph(name: str):
    model, given = build(name).eval(), inputs(name)
    given.pop("labels")
    compiled = torch.compile(lambda: model(**given).logits, fullgraph=True, backend="eager")
    assert_same_logits(compiled(), model(**given).logits)


def test_missing_inputs_and_heads_are_named():
    with pytest.raises(ValueError, match="input_ids, or encoder_outputs"):
        build("T5")(labels=torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="relative positions only"):
        ids = torch.zeros(1, 3, dtype=torch.long)
        build("T5")(ids, decoder_input_ids=ids, decoder_position_ids=ids)
    with pytest.raises(ValueError, match="decoder_input_ids, or labels"):
        build("Transformer")(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="without the head 'nsp'"):
        build("BERT", heads=("mlm",))(
            torch.zeros(1, 3, dtype=torch.long),
            next_sentence_label=torch.zeros(1, dtype=torch.long),
        )
    with pytest.raises(ValueError, match="have no loss for them"):
        build("BERT", heads=("nsp",))(
            torch.zeros(1, 3, dtype=torch.long), labels=torch.zeros(1, 3, dtype=torch.long)
        )
    with pytest.raises(AttributeError, match="no head that gives logits"):
        build("BERT", heads=())(torch.zeros(1, 3, dtype=torch.long)).logits  # noqa: B018
    with pytest.raises(ValueError, match="num_labels=0"):
        build("ViT", num_labels=0)(torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="vocab_size=0"):
        build("Conformer", vocab_size=0)(
            torch.zeros(1, 3, 5), labels=torch.zeros(1, 3, dtype=torch.long)
        )


def test_several_fine_tuned_heads_are_refused():
    with pytest.raises(
        ValueError,
        match="one of the heads classification, tagging, answer at a time; got tagging, answer",
    ):
        build("BERT", heads=("tagging", "answer"))


def test_heads_for_tagging_and_answers_learn():
    """From a pre-trained trunk they learn the even tokens and the bounds of a token's only run."""
    torch.manual_seed(0)
    trunk = build("BERT", dropout=0.0, attention_dropout=0.0)
    ids = torch.randint(3, 29, (32, 9))
    begin, size = torch.randint(0, 6, (32,)), torch.randint(1, 4, (32,))
    inside = (torch.arange(9) >= begin[:, None]) & (torch.arange(9) < (begin + size)[:, None])
    for heads, given, labels in (
        (("tagging",), ids, ids % 2),
        (("answer",), ids.masked_fill(inside, 30), torch.stack([begin, begin + size - 1], 1)),
    ):
        model = trunk.with_heads(*heads, num_labels=2).train()
        step = torch.optim.Adam(model.parameters(), 1e-2)
        losses = []
        for _ in range(60):
            loss = model(given, labels=labels).loss
            step.zero_grad()
            loss.backward()
            step.step()
            losses.append(loss.item())
        logits = model.eval()(given).logits
        right = (logits.argmax(-1 if heads == ("tagging",) else 1) == labels).float().mean().item()
        assert losses[-1] < losses[0] / 3 and right > 0.9, (heads, losses[0], losses[-1], right)
