# SPDX-License-Identifier: Apache-2.0
"""Make the emulator's problems importable: they run on a GPU too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "emulator"))  # for the problems of every path
