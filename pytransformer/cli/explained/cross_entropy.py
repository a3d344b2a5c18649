# SPDX-License-Identifier: Apache-2.0
"""The calls of linear_cross_entropy for `pytransformer explain`."""

from __future__ import annotations

import argparse

import torch

from pytransformer.cli.explained import Arguments, Tensor, check_length

SHAPES = {"linear_cross_entropy": "ROWS,D,CLASSES"}


def call(arguments: argparse.Namespace, tensor: Tensor) -> Arguments:
    check_length(arguments, 3)
    rows, d, classes = arguments.shape
    target = torch.zeros(rows, dtype=torch.int64, device=arguments.device)
    return (tensor(rows, d), tensor(classes, d), target), {}
