# SPDX-License-Identifier: Apache-2.0
"""The classes of ops' arguments: named tuples, made of an op's schema."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast


class ArgumentsClass(Protocol):
    """The named-tuple class of an op's arguments. Its fields are the names in the op's schema, so checkers know none of them."""

    _fields: tuple[str, ...]

    def __call__(self, *values: Any) -> Any: ...

    def _make(self, values: Iterable[Any], /) -> Any: ...


def arguments_class(name: str, fields: Sequence[str], problem: type | None) -> ArgumentsClass:
    """The class of these fields; ``problem``: properties for it, which backends ask."""
    # The stubs take a named tuple whose fields are computed for any tuple. Its __new__ has to stay: torch.compile knows no other.
    made = cast(type, namedtuple(name, fields))
    return cast(ArgumentsClass, made if problem is None else type(name, (made, problem), {"__slots__": ()}))
