"""The merge in Numba: kernels to read and to change, and device functions for `cuda.jit` kernels of your own.

Import it as ``import cuattn.numba``; ``import cuattn`` alone does not load Numba. On a GPU the kernels need
numba-cuda (in the extras ``cuda12x`` and ``cuda13x``); Numba's simulator runs them without either.
"""

from cuattn.numba.state import (
    merge,  # a device function: the weights and the lse of two merged states
    merge_state,
    merge_states,
    merge_states_varlen,
)

__all__ = ["merge", "merge_state", "merge_states", "merge_states_varlen"]
