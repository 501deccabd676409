# SPDX-License-Identifier: Apache-2.0
"""Who wants to be there when DeepSpeed builds an engine: the package's one patch of DeepSpeed's classes.

While anybody watches, ``__init__`` of the two engine classes is a function of ours; afterwards it is DeepSpeed's again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from deepspeed.inference.engine import InferenceEngine
from deepspeed.runtime.engine import DeepSpeedEngine

Watcher = Callable[[Any, Mapping[str, Any]], AbstractContextManager[Any]]
"""Called with an engine and the arguments of its constructor, by name; the engine is built inside what is returned."""


ENGINES: tuple[type, ...] = (DeepSpeedEngine, InferenceEngine)


_watchers: list[Watcher] = []


_stock = {cls: cls.__init__ for cls in ENGINES}  # type: ignore[misc]


def watch(watcher: Watcher) -> Callable[[], None]:
    """Have ``watcher`` around the construction of every engine; of several, the first to come is the outermost.

    Returns:
        Ends the watch; calling it again does nothing.
    """
    if not _watchers:
        for cls in ENGINES:
            _stock[cls] = cls.__init__  # type: ignore[misc]
            cls.__init__ = _watched(cls.__init__)  # type: ignore[misc]
    _watchers.append(watcher)
    return functools.partial(_end, watcher)


def _end(watcher: Watcher) -> None:
    if watcher in _watchers:
        _watchers.remove(watcher)
        if not _watchers:
            for cls, stock in _stock.items():
                cls.__init__ = stock  # type: ignore[misc]


def _watched(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def init(engine: Any, *positional: Any, **keyword: Any) -> None:
        with ExitStack() as stack:
            arguments = inspect.signature(stock).bind(engine, *positional, **keyword).arguments
            for watcher in _watchers:
                stack.enter_context(watcher(engine, arguments))
            stock(engine, *positional, **keyword)

    return init
