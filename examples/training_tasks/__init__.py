# SPDX-License-Identifier: Apache-2.0
"""The tasks of examples/train.py, one per file; `pytransformer.cli.train` describes a task."""
