"""Rotary embedding: a token's position as a rotation of its features, so that scores see only distances.

Features are taken in pairs, rotary_dim / 2 of them, and pair d of a token at position p turns by the angle
``p * frequency[d]``. The caller tabulates: row p of ``cos`` and ``sin`` holds those of all pairs.

    (a, b)  ->  (a cos - b sin, a sin + b cos)

    NeoX style      pair d is features d and d + rotary_dim / 2    (halves; the default)
    interleaved     pair d is features 2 d and 2 d + 1             (GPT-J style)

The two styles are the same up to a permutation of the features. Features from rotary_dim on are left alone.
Rotations preserve lengths, and the product of q at position i with k at position j depends on i - j alone.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def apply_rotary(
    x: ArrayLike, cos: ArrayLike, sin: ArrayLike, positions: ArrayLike, *, interleaved: bool = False
) -> NDArray[np.float64]:
    """Rotate every head of every token by the angles of the token's position.

    Parameters
    ----------
    x : (..., num_heads, head_dim), any float dtype
        Queries or keys. Not changed.
    cos, sin : (max_positions, rotary_dim / 2), any float dtype
        Table of the angles; rotary_dim is even and at most head_dim. Rows of other positions are never read.
    positions : (...), any integer dtype
        Position of each token, from 0 to max_positions - 1.
    interleaved : bool
        Which features make a pair: see above. flash-attn's default is True.

    Returns
    -------
    rotated : (..., num_heads, head_dim), float64

    Raises
    ------
    ValueError
        If shapes disagree or a position is out of range.
    TypeError
        If positions does not hold integers.
    """
    x, cos, sin, positions = (np.asarray(a) for a in (x, cos, sin, positions))
    name = "reference.apply_rotary"
    if x.ndim < 2:
        raise ValueError(f"{name}: x must have at least 2 dimensions; got {x.ndim}")
    if cos.ndim != 2:
        raise ValueError(f"{name}: cos must have 2 dimensions; got {cos.ndim}")
    if sin.shape != cos.shape:
        raise ValueError(f"{name}: sin.shape must equal cos.shape {cos.shape}; got {sin.shape}")
    lead, (rows, half) = x.shape[:-2], cos.shape
    if 2 * half > x.shape[-1]:
        raise ValueError(f"{name}: cos.shape[1] must be at most half of head_dim ({x.shape[-1]}); got {half}")
    if not np.issubdtype(positions.dtype, np.integer):
        raise TypeError(f"{name}: positions must hold integers; got {positions.dtype}")
    if positions.shape != lead:
        raise ValueError(f"{name}: positions.shape must equal x.shape[:-2] {lead}; got {positions.shape}")
    for p in positions[(positions < 0) | (positions >= rows)][:1]:
        raise ValueError(f"{name}: positions must be 0 or more and below cos.shape[0] ({rows}); got {p}")
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    rotated = x.astype(np.float64)
    a, b = rotated[..., first].copy(), rotated[..., second].copy()
    c, s = (table[positions].astype(np.float64)[..., None, :] for table in (cos, sin))
    rotated[..., first] = a * c - b * s
    rotated[..., second] = a * s + b * c
    return rotated
