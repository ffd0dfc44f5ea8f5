"""Attention on CuPy and NumPy arrays, computed in pieces that merge exactly."""

import importlib as _importlib
from pathlib import Path as _Path
from typing import Any as _Any

_root = _Path(__file__).resolve().parent.parent
if (_root / "kernels_cu").is_dir() and (_root / "setup.cfg").is_file():
    __path__.append(str(_root))  # a checkout: cuattn.reference and cuattn.kernels_cu lie beside this folder

from cuattn._compile import CompileError, get_include  # noqa: E402  the CUDA headers, for kernels of your own
from cuattn._settings import checking  # noqa: E402  how much of the arguments is checked
from cuattn._version import __version__  # noqa: E402
from cuattn.attention import (  # noqa: E402  attention of many queries
    AttentionPlan,
    attention,
    attention_varlen,
    plan_attention,
    plan_attention_varlen,
)
from cuattn.base2 import lse_from_base2, lse_to_base2  # noqa: E402  for libraries with base-2 logarithms
from cuattn.decode import (  # noqa: E402  attention of the newest tokens
    DecodePlan,
    decode,
    decode_workspace_size,
    plan_decode,
)
from cuattn.paged import append_kv, copy_pages, gather_kv, swap_pages  # noqa: E402  keys and values in pages
from cuattn.paged_cache import (  # noqa: E402  who has which page
    OutOfPages,
    PagedKVCache,
    PageEvent,
    Swap,
    UnknownSequence,
)
from cuattn.rotary import apply_rotary  # noqa: E402  positions
from cuattn.state import (  # noqa: E402  partial results and how they combine
    AttentionState,
    merge_state,
    merge_state_in_place,
    merge_states,
    merge_states_varlen,
)

__all__ = [
    "AttentionPlan",
    "AttentionState",
    "CompileError",
    "DecodePlan",
    "OutOfPages",
    "PageEvent",
    "PagedKVCache",
    "Swap",
    "UnknownSequence",
    "__version__",
    "append_kv",
    "apply_rotary",
    "attention",
    "attention_varlen",
    "checking",
    "copy_pages",
    "decode",
    "decode_workspace_size",
    "gather_kv",
    "get_include",
    "lse_from_base2",
    "lse_to_base2",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "merge_states_varlen",
    "plan_attention",
    "plan_attention_varlen",
    "plan_decode",
    "swap_pages",
]


def __getattr__(name: str) -> _Any:
    if name in ("numba", "testing"):  # imported when they are first used: they need more packages
        return _importlib.import_module(f"cuattn.{name}")
    raise AttributeError(f"module 'cuattn' has no attribute {name!r}")
