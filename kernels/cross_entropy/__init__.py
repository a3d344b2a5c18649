# SPDX-License-Identifier: Apache-2.0
"""Linear map and cross entropy in Triton: logits by the library, a chunk of rows at a time, and one kernel over them each way."""
