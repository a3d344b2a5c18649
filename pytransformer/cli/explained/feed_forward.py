# SPDX-License-Identifier: Apache-2.0
"""The calls of feed_forward for `pytransformer explain`."""

from __future__ import annotations

import argparse

from pytransformer.cli.explained import Arguments, Tensor, check_length, dropout

SHAPES = {"feed_forward": "ROWS,D,HIDDEN"}


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--activation", choices=("relu", "gelu", "gelu_tanh", "silu"), default="relu"
    )
    group.add_argument("--gated", action="store_true", help="with gate_weight")


def call(arguments: argparse.Namespace, tensor: Tensor) -> Arguments:
    check_length(arguments, 3)
    rows, d, hidden = arguments.shape
    gate = (
        {"gate_weight": tensor(hidden, d), "gate_bias": tensor(hidden)} if arguments.gated else {}
    )
    weights = (tensor(hidden, d), tensor(hidden), tensor(d, hidden), tensor(d))
    return (tensor(rows, d), *weights), {
        "activation": arguments.activation,
        **gate,
        **dropout(arguments),
    }
