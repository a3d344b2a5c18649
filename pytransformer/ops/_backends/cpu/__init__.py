# SPDX-License-Identifier: Apache-2.0
"""The backend ``cpu``: native C++ of csrc/cpu."""
