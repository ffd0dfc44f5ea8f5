"""What a paged cache keeps about one sequence, and how the arguments of its methods are read."""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Callable, Hashable, ItemsView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from cuattn._prefix_hash import Salt

MAX_COUNT = 2**31 - 1  # page ids and lengths are int32 for kernels
Pairs = list[tuple[int, int]]  # (source page, target page)
RELEASED = -1  # in a table: the page behind the window that is no longer held

P = ParamSpec("P")
R = TypeVar("R")


class UnknownSequence(KeyError):
    """A sequence id that the cache doesn't know; a KeyError with a readable message."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class Record:
    """One sequence. The table has a page for every `page_size` tokens begun, never one more."""

    salt: Salt
    length: int = 0  # tokens
    table: array[int] = field(default_factory=lambda: array("i"))  # pages, or slots of the host pool
    tokens: array[int] = field(
        default_factory=lambda: array("q")
    )  # ids, as far as they are known without a gap
    digests: list[bytes] = field(default_factory=list)  # names of the leading full pages, made when needed
    settled: int = 0  # leading pages that are published themselves, or released
    released: int = 0  # leading pages that are released
    shortest: int = 0  # a truncation may not leave less: what is released could come into the window again
    place: Literal["on the device", "on its way", "on the host"] = "on the device"

    def copy(self) -> Record:
        """An independent record with the same contents."""
        return replace(self, table=self.table[:], tokens=self.tokens[:], digests=self.digests[:])

    def held(self) -> list[int]:
        """The pages that it holds, last one first: the order in which they should be evicted."""
        return self.table[self.released :][::-1].tolist()

    def cut(self, length: int, page_size: int) -> None:
        """Forget everything from token `length` on."""
        del self.table[-(-length // page_size) :], self.tokens[length:], self.digests[length // page_size :]
        self.settled = min(self.settled, length // page_size)
        self.length = length


def locked(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method that runs under the lock of its object."""

    @functools.wraps(method)
    def run(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return run


def count(where: str, value: Any, low: int = 0, high: int | None = None) -> int:
    """An integer argument; `where` is "function: argument"."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{where} must be an integer; got {type(value).__name__}") from None
    if number < low or (high is not None and number > high):
        rule = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{where} must be {rule}; got {number}")
    return number


def by_sequence(where: str, values: Mapping[Hashable, R]) -> ItemsView[Hashable, R]:
    """What an argument has for each sequence; `where` is "function: argument"."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{where} must be a mapping of sequence ids; got {type(values).__name__}")
    return values.items()


def token_ids(where: str, tokens: Sequence[int] | np.ndarray) -> array[int]:
    """Token ids as 64-bit integers; `where` is "function: argument"."""
    ids = np.asarray(tokens)
    if ids.shape == (0,):
        return array("q")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"{where} must be a sequence of integers; got shape {ids.shape}, dtype {ids.dtype}")
    if ids.dtype == np.uint64 and int(ids.max()) >= 1 << 63:
        raise ValueError(f"{where} must be less than 2**63; got {ids.max()}")
    return array("q", ids.astype(np.int64).tobytes())
