"""Hypothesis strategies: hypothesis draws structure, NumPy fills the values (see `profiles`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cuattn.testing.cases import LAYOUTS, StateCase
from cuattn.testing.profiles import DTYPES, PROFILES

try:
    import hypothesis.strategies as st
except ImportError as error:
    raise ImportError("cuattn.testing: strategies and laws need hypothesis; install cuattn[test]") from error

HEAD_DIMS = (1, 40, 64, 72, 80, 96, 100, 112, 128, 192, 256, 512)  # powers of 2; multiples of 8, of 4
HEADS = (1, 2, 3, 5, 7, 12, 32, 64, 128)
MAX_ELEMENTS = 2**18                                          # of one case: rows shrink as head_dim grows


def head_dims() -> st.SearchStrategy[int]:
    """Draw a head_dim: those in use (`HEAD_DIMS`) half of the time, else anything from 1 to 512."""
    return st.sampled_from(HEAD_DIMS) | st.integers(1, 512)


def dtypes() -> st.SearchStrategy[str]:
    """Draw the name of a storage dtype: float16, bfloat16 or float32."""
    return st.sampled_from(DTYPES)


@st.composite
def rows(draw: st.DrawFn, max_rows: int = 130) -> tuple[int, ...]:
    """Draw ``(tokens,)``, ``(tokens, heads)`` or ``(batch, tokens, heads)``; zeros occur."""
    axes = draw(st.integers(1, 3))
    if axes == 1:
        return (draw(st.integers(0, min(max_rows, 9))),)
    heads = draw(st.sampled_from([h for h in HEADS if h <= max(max_rows, 1)]))
    tokens = draw(st.integers(0, min(9, max_rows // heads)))
    if axes == 2:
        return tokens, heads
    return draw(st.integers(0, min(3, max_rows // (heads * max(tokens, 1))))), tokens, heads


@st.composite
def state_cases(draw: st.DrawFn, *, min_states: int = 0, max_states: int = 9, max_rows: int = 130,
                dtypes: Sequence[str] = DTYPES, head_dims: Sequence[int] | None = None,
                profiles: Sequence[str] = PROFILES, layouts: Sequence[str] = LAYOUTS) -> StateCase:
    """Draw a merge problem.

    Parameters
    ----------
    draw : callable
        Given by hypothesis; callers leave it out.
    min_states, max_states : int
        Range of the number of states.
    max_rows : int
        Largest product of the leading dimensions; from 128 on, cases with 128 heads occur.
    dtypes, profiles, layouts : sequence of str
        To choose from; the first is what failures shrink to.
    head_dims : sequence of int, optional
        To choose from. Default: the strategy `head_dims`.

    Returns
    -------
    StateCase
        Of at most `MAX_ELEMENTS` elements, as far as one row per state allows.

    """
    wide = globals()["head_dims"]() if head_dims is None else st.sampled_from(list(head_dims))
    head_dim, num_states = draw(wide), draw(st.integers(min_states, max_states))
    room = max(1, MAX_ELEMENTS // (head_dim * max(num_states, 1)))
    return StateCase(
        rows=draw(rows(min(max_rows, room))), num_states=num_states, head_dim=head_dim,
        dtype=draw(st.sampled_from(list(dtypes))), profile=draw(st.sampled_from(list(profiles))),
        layout=draw(st.sampled_from(list(layouts))), seed=draw(st.integers(0, 2**32 - 1)))


def partitions(n: int, max_parts: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw cut points ``(0, ..., n)`` in ascending order; repeated ones make empty parts.

    Part i is ``slice(cuts[i], cuts[i + 1])``; there is at least one.
    """
    inner = st.lists(st.integers(0, n), max_size=max_parts - 1)
    return inner.map(lambda cuts: (0, *sorted(cuts), n))


def indptrs(max_segments: int = 6, max_length: int = 5, min_length: int = 0,
            dtypes: Sequence[str] = ("int32", "int64")) -> st.SearchStrategy[np.ndarray]:
    """Draw ragged segments as ``indptr (segments + 1,)``, int32 or int64, from 0; empty segments occur."""
    lengths = st.lists(st.integers(min_length, max_length), max_size=max_segments)
    dtype = st.sampled_from(list(dtypes))
    return st.builds(lambda ns, dtype: np.cumsum([0, *ns]).astype(dtype), lengths, dtype)
