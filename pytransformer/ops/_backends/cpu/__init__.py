"""The tier ``cpu``: native C++ of csrc/cpu."""
