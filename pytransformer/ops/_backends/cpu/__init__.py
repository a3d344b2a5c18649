# SPDX-License-Identifier: Apache-2.0
"""The tier ``cpu``: native C++ of csrc/cpu."""
