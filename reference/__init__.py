"""What cuattn computes, defined in float64 NumPy: slow, short, and readable without knowing a GPU.

Every function has the name, the argument order and the meaning of the public function it defines.
The page of mathematics that the rest refers to is the docstring of ``attention.py``.
"""

from .attention import attention  # softmax(q k^T) v over the visible keys, as a state (out, lse)
from .attention_varlen import attention_varlen  # of packed sequences, each by itself, or with keys in pages
from .decode import decode  # the same over pages, for the newest tokens of each sequence
from .paged import (  # where keys and values lie
    append_kv,
    copy_pages,
    copy_pages_between,
    gather_kv,
    gather_sequence,
    slots,
)
from .rotary import apply_rotary  # positions as rotations
from .state import (  # combining the states of disjoint sets of keys
    empty_state,
    lse_from_base2,
    lse_to_base2,
    merge_state,
    merge_states,
    merge_states_varlen,
)

__all__ = [
    "append_kv",
    "apply_rotary",
    "attention",
    "attention_varlen",
    "copy_pages",
    "copy_pages_between",
    "decode",
    "empty_state",
    "gather_kv",
    "gather_sequence",
    "lse_from_base2",
    "lse_to_base2",
    "merge_state",
    "merge_states",
    "merge_states_varlen",
    "slots",
]
