"""Settings from the environment: CUATTN_CHECK, CUATTN_DEBUG, and what they print."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LEVELS = ("arguments", "values")
_check: ContextVar[str | None] = ContextVar("cuattn_check", default=None)


@contextmanager
def checking(level: str) -> Iterator[None]:
    """Check arguments more or less thoroughly within a ``with`` block, in this thread or task.

    Parameters
    ----------
    level : {"arguments", "values"}
        ``"arguments"`` (the default) checks what the host knows: shapes, dtypes, strides, devices. ``"values"`` also
        reads index arrays back from the device (ids in range, ascending offsets); it synchronises, so it can't be
        used inside a graph capture. The environment variable ``CUATTN_CHECK`` sets the level outside any block; it is
        read at the first call.

    Raises
    ------
    ValueError
        If `level` is neither.
    """
    token = _check.set(_valid(level, "checking: level"))
    try:
        yield
    finally:
        _check.reset(token)


def checks_values() -> bool:
    """Whether index arrays are to be read back and checked."""
    return (_check.get() or _environment_level()) == "values"


@functools.cache  # the environment takes a microsecond
def _environment_level() -> str:
    return _valid(os.environ.get("CUATTN_CHECK", _LEVELS[0]), "CUATTN_CHECK")


def _valid(level: str, where: str) -> str:
    if level not in _LEVELS:
        raise ValueError(f"{where} must be one of {', '.join(_LEVELS)}; got {level!r}")
    return level


def debug(level: int, text: object) -> None:
    """Print `text` to stderr if ``CUATTN_DEBUG`` is at least `level`: 1 plans, 2 compilations, 3 sources."""
    wanted = os.environ.get("CUATTN_DEBUG") or "0"
    if wanted not in ("0", "1", "2", "3"):
        raise ValueError(f"CUATTN_DEBUG must be 0, 1, 2 or 3; got {wanted!r}")
    if int(wanted) >= level:
        print(f"cuattn: {text}", file=sys.stderr)
