# SPDX-License-Identifier: Apache-2.0
"""What runs in the emulator runs on a GPU too."""

import sys
from pathlib import Path

sys.path.append(
    str(Path(__file__).parents[1] / "emulator")
)  # for the problems that reach every path
