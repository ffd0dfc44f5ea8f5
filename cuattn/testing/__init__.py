"""Test merges of attention states: yours or ours, on any array library.

One line checks a merge ``(out_a, lse_a, out_b, lse_b) -> (out, lse)`` against all the laws::

    def test_my_merge():
        cuattn.testing.check_merge(my_merge, dtypes=["float32"])

The strategies and the laws need hypothesis (the extra ``cuattn[test]``); the rest needs NumPy and
ml_dtypes.
"""

from __future__ import annotations

import importlib
from typing import Any

from cuattn.testing.cases import (  # merge problems, layouts, guard bytes
    LAYOUTS,
    StateCase,
    check_guard,
    guarded,
    place,
    to_device,
)
from cuattn.testing.compare import assert_close, assert_same_bits, assert_state, to_host
from cuattn.testing.profiles import DTYPES, PROFILES
from cuattn.testing.tolerance import attention_bound, fold_bound, merge_bound

_LAZY = {                                                  # imported on first use: they need hypothesis
    "strategies": None,                                    # state_cases, head_dims, dtypes, partitions ...
    "laws": None,
    "MergeLaws": "laws",                                   # the laws one by one
    "check_merge": "laws",                                 # all of them in one call
    "state_cases": "strategies",
}

__all__ = [
    "DTYPES", "LAYOUTS", "PROFILES", "MergeLaws", "StateCase", "assert_close", "assert_same_bits",
    "assert_state", "attention_bound", "check_guard", "check_merge", "fold_bound", "guarded", "laws",
    "merge_bound", "place", "state_cases", "strategies", "to_device", "to_host",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'cuattn.testing' has no attribute {name!r}")
    module = importlib.import_module(f"cuattn.testing.{_LAZY[name] or name}")
    return getattr(module, name) if _LAZY[name] else module
