# SPDX-License-Identifier: Apache-2.0
"""Every architecture of Hugging Face transformers, tiny, with random weights: eager against ours.

    python -m support.sweep                     # every model type
    python -m support.sweep bert llama          # some of them
    python -m support.sweep --write             # write architectures.json and .md
    python -m support.sweep --write --json FILE --resume       # resume a run

The results are in tests/integrations. :mod:`.configs` and :mod:`.corrections` shrink a config,
:mod:`.inputs` and :mod:`.given` build inputs for a ``forward``, :mod:`.compare` tests one model
type, :mod:`.run` tests many in child processes, and :mod:`.report` stores the results and writes
the page. Needs transformers.
"""
