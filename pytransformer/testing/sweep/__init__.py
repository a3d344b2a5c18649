# SPDX-License-Identifier: Apache-2.0
"""Every architecture of Hugging Face transformers, tiny and with random weights: eager code against ours.

    python -m pytransformer.testing.sweep                     # every model type, a table of verdicts
    python -m pytransformer.testing.sweep bert llama          # some
    python -m pytransformer.testing.sweep --write             # all, into tests/integrations/architectures.json and .md
    python -m pytransformer.testing.sweep --write --json FILE --resume       # the same, going on where a run was cut

:mod:`.configs` and :mod:`.corrections` shrink a config, :mod:`.inputs` and :mod:`.given` make inputs for a ``forward``, :mod:`.compare`
tries one model type and judges it, :mod:`.run` tries many in processes of their own, :mod:`.report` keeps the results and writes the
page. Needs transformers.
"""
