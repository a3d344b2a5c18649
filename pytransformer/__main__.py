# SPDX-License-Identifier: Apache-2.0
"""`python -m pytransformer` is the console script `pytransformer`."""

import sys

from pytransformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
