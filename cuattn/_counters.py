"""Counters in device memory, 0 before a launch: which item of work comes next, for blocks that take items.

Launches get them in turn: one must be over when, that many launches later, its counter is used again. Neither a stream
nor CuPy's pool owns them, since handles of streams are used again before their work is done. What goes into a CUDA
graph keeps its counter for as long as the process. When those are used up, or before anything ran on the device, there
is none, and the kernel deals its items by a fixed rule.
"""

from __future__ import annotations

import threading
from typing import Any

_IN_TURN = _FOR_GRAPHS = 1 << 16


class Counters:
    """The counters of CuPy's devices."""

    def __init__(self, cupy: Any) -> None:
        self._cupy, self._lock = cupy, threading.Lock()
        self._memory: dict[int, Any] = {}
        self._launches: dict[int, int] = {}
        self._captured: dict[int, int] = {}

    def zeroed(self, device: int) -> Any:
        """An array of one uint32, set to 0 in the current stream of `device`, the current device; or None."""
        capturing = self._cupy.cuda.get_current_stream().is_capturing()
        with self._lock:
            if device not in self._memory:
                if capturing:
                    return None
                self._memory[device] = self._cupy.ndarray((_IN_TURN + _FOR_GRAPHS,), "uint32")
                self._launches[device] = self._captured[device] = 0
            if capturing:
                n = _IN_TURN + self._captured[device]
                if n == _IN_TURN + _FOR_GRAPHS:
                    return None
                self._captured[device] += 1
            else:
                n = self._launches[device] % _IN_TURN
                self._launches[device] += 1
        counter = self._memory[device][n : n + 1]
        counter.data.memset_async(0, 4)
        return counter
