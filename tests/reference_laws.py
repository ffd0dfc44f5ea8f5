"""What the tests of the float64 reference share: tolerances, comparisons, the nearest 8-bit float.

Tolerances are first-order bounds in u = 2**-53 on the difference of two evaluations of one formula. ``size``
bounds every partial sum of a score, every lse and every sink; V bounds the values; n is the number of keys.

* A score passes head_dim + 8 roundings at most (products, sums, sm_scale, k_scale, tanh, softcap, ALiBi), and
  neither tanh nor a difference enlarges an error: two evaluations differ by delta = 2 (head_dim + 8) u size.
* A weight exp(s - m) / total: s and m move by delta each; s - m is rounded, 2 size u, twice; exp, sum and
  quotient add (2 n + 32) u. Weights differ relatively by eta = 2 delta + (4 size + 2 n + 32) u, numerator and
  total alike, so out by 2 eta V. lse moves no more than the largest score, and its own rounding: by eta.
* One merge rounds a weight by r = (4 size + 16) u at most. In a chain of merges the errors of lse add up to
  rho = merges * r, and each disturbs the weights of all later merges: out by 4 merges rho V.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

U = 2.0**-53
laws = settings(max_examples=400, deadline=None)
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
GRID = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float64)  # every number that has 8 bits


@pytest.fixture(autouse=True, scope="module")
def floating_point_errors_raise():
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        yield


def naive_state(scores, values, head_dim_v):
    """Section 2 of the page for one row, with Python's exactly rounded sums."""
    if not scores:
        return np.zeros(head_dim_v), -math.inf
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum(weights)
    sums = [math.fsum(w * x[d] for w, x in zip(weights, values, strict=True)) for d in range(head_dim_v)]
    return np.array(sums) / total, top + math.log(total)


def bounds(arrays, options):
    """Return eta, size and V of the module's docstring."""
    q, k, v = (np.abs(x.astype(np.float64)) for x in arrays)
    k = (k * np.reshape(options.get("k_scale", 1.0), (-1, 1))).repeat(q.shape[2] // k.shape[2], axis=2)
    v = v * np.reshape(options.get("v_scale", 1.0), (-1, 1))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * (options["sm_scale"] or q.shape[3] ** -0.5)
    sinks, slopes = np.abs(options.get("sinks", 0.0)), np.abs(options.get("alibi_slopes", 0.0))
    score, sink, slope, value = (np.max(x, initial=0.0) for x in (scores, sinks, slopes, v))
    size = score + sink + slope * (q.shape[1] + k.shape[1]) + math.log(k.shape[1] + 2)
    return 4 * (q.shape[3] + 8) * U * size + (4 * size + 2 * k.shape[1] + 32) * U, size, value


def assert_state(got, expected, tol_out, tol_lse):
    for x, y, tol in zip(got, expected, (tol_out, tol_lse), strict=True):
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, y, rtol=0, atol=tol, strict=True)  # shape, inf and NaN in place too


def assert_same_bits(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def nearest8(x):
    """The nearest 8-bit float, of two the one whose last bit is 0, and never beyond the largest."""
    order = np.array(sorted(np.flatnonzero(np.isfinite(GRID[:128])), key=lambda bits: bits % 2), np.uint8)
    bits = order[np.abs(GRID[order] - np.minimum(np.abs(x), 448)[..., None]).argmin(axis=-1)]
    return (bits + np.signbit(x) * np.uint8(128)).view(FP8)


def angles(rows, half, seed):
    """Exact products of positions and frequencies."""
    return np.arange(rows)[:, None] * (np.random.default_rng(seed).integers(1, 2**20, half) / 2**20)
