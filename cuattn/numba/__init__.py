"""Merges and the bookkeeping of pages in Numba: to read and to change, and device functions for `cuda.jit` kernels.

Import it as ``import cuattn.numba``; ``import cuattn`` alone does not load Numba. On a GPU the kernels need
numba-cuda (in the extras ``cuda12x`` and ``cuda13x``); Numba's simulator runs them without either.
"""

from cuattn.numba.paged import (
    locate,  # a device function: the page and the offset of a slot
    sequence_of,  # a device function: the sequence that a row of a packed array belongs to
    slot_mapping,  # where the next tokens of each sequence go
    slot_mapping_varlen,
    slot_of,  # a device function: the slot of a token
)
from cuattn.numba.state import (
    merge,  # a device function: the weights and the lse of two merged states
    merge_state,
    merge_states,
    merge_states_varlen,
)
from cuattn.numba.tables import (
    advance,  # lengths that grow
    update_block_table,  # pages that are new
)

__all__ = [
    "advance",
    "locate",
    "merge",
    "merge_state",
    "merge_states",
    "merge_states_varlen",
    "sequence_of",
    "slot_mapping",
    "slot_mapping_varlen",
    "slot_of",
    "update_block_table",
]
