# SPDX-License-Identifier: Apache-2.0
"""What is changed on living objects, and how all of it is undone."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Patches:
    """Changes to instances of DeepSpeed's classes. Keeps none of them alive."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def bind(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Shadow a method of the owner's class on the instance."""
        setattr(owner, name, functools.update_wrapper(function, getattr(type(owner), name)))
        self.at_undo(owner, lambda alive: delattr(alive, name))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of the instance."""
        before = getattr(owner, name)
        setattr(owner, name, value)
        self.at_undo(owner, lambda alive: setattr(alive, name, before))

    def at_undo(self, owner: Any, act: Callable[[Any], None]) -> None:
        """Have ``act`` called with the owner at the undoing, if it is still alive; the last to come is the first."""
        self._undo.append(functools.partial(_if_alive, weakref.ref(owner), act))

    def undo(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def _if_alive(ref: weakref.ref[Any], act: Callable[[Any], None]) -> None:
    owner = ref()
    if owner is not None:
        act(owner)


@contextmanager
def bound(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Shadow a method of the owner's class on the instance while the body runs."""
    patches = Patches()
    patches.bind(owner, name, function)
    try:
        yield
    finally:
        patches.undo()
