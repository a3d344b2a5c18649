# SPDX-License-Identifier: Apache-2.0
"""Digests of source code are the same on every Python, for every kind of statement.

Python's syntax trees change between versions: 3.12 adds the field ``type_params``, 3.13 omits empty
lists from a dump. The digests below were computed with 3.10 to 3.13.
"""

from __future__ import annotations

from typing import Any

import pytest

from pytransformer.integrations.convert import code


# fmt: off
class Sample:
    def plain(self, x: Any, *more: Any, scale: float = 1.0, **rest: Any) -> Any:
        """Return a number; a docstring is not part of a digest."""
        return x * scale + sum(more)  # nor is a comment

    def inner_function(self, x: Any) -> Any:
        def inner(y: Any) -> Any:
            return y + x
        return inner(x)

    def inner_class(self, x: Any) -> Any:
        class Inner:
            value = 1
        return Inner.value + x

    def text(self, x: Any) -> str:
        return f"{x!r:>10} and {self.text} {{}}" "joined"

    def expressions(self, x: Any) -> Any:
        pairs = {k: v for k, v in x.items() if v}
        (first, *others), flag = sorted(pairs), not x or None
        return [lambda z=y: z for y in others], first[1:, ..., None], flag

    def statements(self, x: Any) -> Any:
        with open(x) as a, open(a):
            try:
                while x:
                    x -= 1
                else:
                    raise ValueError(x) from None
            except (OSError, ValueError):
                return (yield x)
            finally:
                del x

    def matching(self, x: Any) -> Any:
        match x:
            case {"a": [1, *_], **others} if others:
                return others
            case Sample() | None:
                return (y := x) + y
# fmt: on


DIGESTS = {
    "plain": "033476a81201",
    "inner_function": "030de9241395",
    "inner_class": "284465dd0c28",
    "text": "045c41188073",
    "expressions": "cd727cb03da5",
    "statements": "0a8eb0869606",
    "matching": "cee6edab26b9",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_digests_do_not_depend_on_the_version_of_python(name: str) -> None:
    assert code.digest(Sample, name) == DIGESTS[name]


def test_every_method_of_the_sample_is_listed() -> None:
    assert DIGESTS.keys() == {n for n in vars(Sample) if not n.startswith("_")}
