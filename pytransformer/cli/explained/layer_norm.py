# SPDX-License-Identifier: Apache-2.0
"""The calls of the norms for `pytransformer explain`."""

from __future__ import annotations

import argparse

from pytransformer.cli.explained import Arguments, Tensor, check_length, dropout

SHAPES = dict.fromkeys(("layer_norm", "rms_norm", "add_norm"), "ROWS,D")


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--kind", choices=("layer", "rms"), default="layer", help="of add_norm")


def call(arguments: argparse.Namespace, tensor: Tensor) -> Arguments:
    check_length(arguments, 2)
    rows, d = arguments.shape
    x = tensor(rows, d)
    match arguments.op:
        case "layer_norm":
            return (x, (d,), tensor(d), tensor(d)), {}
        case "rms_norm":
            return (x, (d,), tensor(d)), {}
    bias = tensor(d) if arguments.kind == "layer" else None
    return (x, tensor(rows, d), tensor(d), bias), {"kind": arguments.kind, **dropout(arguments)}
