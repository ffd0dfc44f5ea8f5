"""Counters in device memory: which item of work comes next, for kernels whose blocks take items until none are left.

A kernel leaves its counter at 0, so none is ever set. Launches in one stream follow each other and share a counter.
What goes into a CUDA graph, which may run beside its stream, gets one that the graph keeps for good.
"""

from __future__ import annotations

import threading
from typing import Any

_AT_ONCE = 1024  # how many are allocated together
_PER_THREAD = 2  # the handle that every thread's own default stream has


class Counters:
    """The counters of CuPy's streams."""

    def __init__(self, cupy: Any) -> None:
        self._cupy, self._lock = cupy, threading.Lock()
        self._unused: dict[int, list[Any]] = {}
        self._of_stream: dict[tuple[int, int, int], Any] = {}

    def of_current_stream(self, device: int) -> Any:
        """An array of one uint32, for a launch in the current stream of `device`, which is the current device.

        Raises
        ------
        RuntimeError
            If the stream is being captured and no counter is left, since nothing can be allocated then.
        """
        stream = self._cupy.cuda.get_current_stream()
        with self._lock:
            if stream.is_capturing():
                return self._unused_of(device, True).pop()
            key = device, stream.ptr, threading.get_ident() if stream.ptr == _PER_THREAD else 0
            if key not in self._of_stream:
                self._of_stream[key] = self._unused_of(device, False).pop()
            return self._of_stream[key]

    def _unused_of(self, device: int, capturing: bool) -> list[Any]:
        unused = self._unused.setdefault(device, [])
        if not unused:
            if capturing:
                rule = "nothing can be allocated while a graph is captured"
                raise RuntimeError(f"{rule}: call attention on this device before")
            counters = self._cupy.zeros(_AT_ONCE, "uint32")
            self._cupy.cuda.get_current_stream().synchronize()  # other streams will use them
            unused.extend(counters[n : n + 1] for n in range(_AT_ONCE))
        return unused
