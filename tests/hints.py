# SPDX-License-Identifier: Apache-2.0
"""Type checks of user calls: mypy reads this file in `make check` and nothing runs it.

An unused ignore is an error there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

import pytransformer as pt
from pytransformer import models, nn
from pytransformer.explain import Explanation
from pytransformer.integrations.explain_model import ModelExplanation


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, asked: bool) -> None:
    assert_type(pt.attention(q, k, v, causal="top_left", key_lengths=lengths), Tensor)
    assert_type(pt.attention(q, k, v, bias=pt.AlibiBias(q), return_lse=True), tuple[Tensor, Tensor])
    assert_type(pt.attention(q, k, v, return_lse=asked), Tensor | tuple[Tensor, Tensor])
    assert_type(pt.reference.attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(pt.attention_varlen(q, k, v, lengths, lengths, 3, 3, window=(2, None)), Tensor)
    assert_type(pt.attention_weights(q, k, lengths, rows=[1], softcap=2.0), Tensor)
    pt.attention(q, k, v, causl="top_left")  # type: ignore[call-overload]
    pt.attention(q, k, v, causal="bottom-right")  # type: ignore[call-overload]
    pt.attention_weights(q, k, lengths, dropout_p=0.1)  # type: ignore[call-arg]


def rows(x: Tensor, w: Tensor) -> None:
    assert_type(pt.add_norm(x, None, w), tuple[Tensor, Tensor])
    assert_type(pt.reference.layer_norm(x, 16), Tensor)
    assert_type(pt.feed_forward(x, w, None, w, None, activation="gelu"), Tensor)
    models.BERTConfig(activation="tanh")  # type: ignore[arg-type]


def controls(x: Tensor, module: torch.nn.Module) -> None:
    assert_type(pt.explain("attention", x, x, x), Explanation)
    assert_type(pt.explain(module, x), ModelExplanation)
    with pt.use_backend(attention=None, layer_norm="cpu"), pt.activate():
        pass


def modules(ids: Tensor) -> None:
    model = models.GPT.from_preset("base", dropout=0.0)
    assert_type(model, models.GPT)
    assert_type(model.config.num_layers, int)
    assert_type(model(ids, labels=ids).loss, Tensor | None)
    assert_type(model.forward(ids).logits, Tensor)
    assert_type(model.head.bias, Tensor | None)
    assert_type(nn.Alibi(8).slopes, Tensor)
    assert_type(models.T5.load("folder").config.pad_token_id, int)
