"""What the kernels on index arrays share: arguments become a `Call`, and run on their device or in the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numba import cuda

from cuattn import _check
from cuattn._call import Call

THREADS = 128


def indices(
    function: str, arrays: dict[str, Any], axes: dict[str, tuple[str, ...]] | None = None,
    optional: tuple[str, ...] = (),
) -> Call:  # fmt: skip
    """A call whose arguments are index arrays; those without `axes` have one."""
    call = Call(function, arrays)
    call.required(*(name for name in arrays if name not in optional))
    for name, spec in call.specs.items():
        if spec is not None:
            _check.axes(f"{function}: {name}", spec, (axes or {}).get(name, ("n",)))
            _check.dtype(f"{function}: {name}", spec, _check.INDICES)
            _check.strides_in_elements(f"{function}: {name}", spec)
    simulated = bool(cuda.config.ENABLE_CUDASIM)
    if any(isinstance(array, np.ndarray) != simulated for array in call.arrays.values() if array is not None):
        rule = "NumPy arrays in" if simulated else "on a CUDA device outside"
        raise TypeError(f"{function}: arrays must be {rule} Numba's simulator (NUMBA_ENABLE_CUDASIM=1)")
    return call


def same_length(call: Call, *names: str) -> int:
    """How many entries the arrays have, all of them equally many."""
    first, *others = call.required(*names)
    for name, spec in zip(names[1:], others):
        _check.shape(f"{call.function}: {name}", spec, first.shape, f"{names[0]}.shape")
    return first.shape[0]


def written(call: Call, name: str) -> None:
    """An array that is written lies apart from the others, and no two of its elements in one place."""
    _check.outputs(call, {name: ()})
    _check.distinct_elements(f"{call.function}: {name}", call.required(name)[0])


def refuse(call: Call, name: str, values: np.ndarray, wrong: np.ndarray, rule: str) -> None:
    """For ``checking("values")``."""
    for i in np.flatnonzero(wrong)[:1]:
        raise ValueError(f"{call.function}: {name}[{i}] must be {rule}; got {values[i]}")


def once(call: Call, name: str, values: Iterable[Any]) -> None:
    """For ``checking("values")``: each at most once."""
    for value, times in Counter(values).most_common(1):
        if times > 1:
            raise ValueError(f"{call.function}: {name} must name each at most once; got {value} {times} times")


def launch(call: Call, kernel: Any, threads: int, args: Sequence[Any]) -> None:
    """Run a kernel with at least so many threads, on CuPy's current stream of the arrays' device."""
    if not threads:
        return
    grid = -(-threads // THREADS)
    if cuda.config.ENABLE_CUDASIM:  # it would copy bare arrays, and refuse some strides
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        kernel[grid, THREADS](*(FakeCUDAArray(a) if isinstance(a, np.ndarray) else a for a in args))
        return
    import cupy

    with cuda.gpus[call.device]:
        stream = cuda.external_stream(cupy.cuda.get_current_stream(call.device).ptr)
        # The arrays are used on the stream they were exported from: waiting for it would hold up the host.
        kernel[grid, THREADS, stream](
            *(a if isinstance(a, int) else cuda.as_cuda_array(a, sync=False) for a in args)
        )
