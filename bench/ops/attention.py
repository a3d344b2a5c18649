"""pytest-benchmark runs of attention, attention_varlen; see bench/conftest.py."""

OPS = ("attention", "attention_varlen")


def test_speed(timed) -> None:
    timed()
