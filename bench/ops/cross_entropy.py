"""pytest-benchmark runs of linear_cross_entropy; see bench/conftest.py."""

OPS = ("linear_cross_entropy",)


def test_speed(timed) -> None:
    timed()
