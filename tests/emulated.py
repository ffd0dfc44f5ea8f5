"""What the tests of the emulator share: modules compiled once, orders of threads, lanes."""

from __future__ import annotations

import functools
import pathlib

import numpy as np

from tests.emulator import EmulatedModule

ORDERS = [("forward", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)]
ROOT = pathlib.Path(__file__).parent.parent
LANES = np.arange(32)
FULL = 0xFFFFFFFF


@functools.cache
def compiled(
    source: str, entries: str, defines: tuple[tuple[str, str], ...] = (), **options
) -> EmulatedModule:
    return EmulatedModule(source, entries.split(), dict(defines), **options)
