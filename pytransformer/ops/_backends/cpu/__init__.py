# SPDX-License-Identifier: Apache-2.0
"""The backend ``cpu``, native C++ in csrc/cpu."""
