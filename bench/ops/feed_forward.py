"""pytest-benchmark runs of feed_forward; see bench/conftest.py."""

OPS = ("feed_forward",)


def test_speed(timed) -> None:
    timed()
