"""pytest-benchmark runs of layer_norm, rms_norm, add_norm; see bench/conftest.py."""

OPS = ("layer_norm", "rms_norm", "add_norm")


def test_speed(timed) -> None:
    timed()
