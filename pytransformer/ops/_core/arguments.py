# SPDX-License-Identifier: Apache-2.0
"""Named-tuple classes of the ops' arguments, built from an op's schema."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast


class ArgumentsClass(Protocol):
    """The named-tuple class of an op's arguments.

    Its fields come from the op's schema, so type checkers do not know them.
    """

    _fields: tuple[str, ...]

    def __call__(self, *values: Any) -> Any: ...

    def _make(self, values: Iterable[Any], /) -> Any: ...


def arguments_class(name: str, fields: Sequence[str], problem: type | None) -> ArgumentsClass:
    """Return the class with these fields; it inherits the properties of ``problem``."""
    # Type stubs treat a named tuple with computed fields as any tuple. Its __new__ must stay,
    # because torch.compile supports no other.
    made = cast(type, namedtuple(name, fields))
    return cast(
        ArgumentsClass, made if problem is None else type(name, (made, problem), {"__slots__": ()})
    )
