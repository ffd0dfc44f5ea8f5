"""Laws of attention in the float64 reference: hypothesis draws structure, NumPy fills values from a seed.

`naive_attention` writes down the definition a second time. Tolerances are derived in ``reference_laws.py``.
"""

import math
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import reference
from tests.reference_laws import (
    U,
    assert_same_bits,
    assert_state,
    bounds,
    dtypes,
    floating_point_errors_raise,
    laws,
    naive_state,
    seeds,
)

__all__ = ["floating_point_errors_raise"]  # for every test here

CASE = {
    "batch": st.integers(0, 2),
    "seqlen_q": st.integers(0, 4),
    "seqlen_k": st.integers(0, 7),
    "heads_kv": st.integers(1, 2),
    "group": st.integers(1, 3),
    "head_dim": st.sampled_from([1, 5, 8, 40]),
    "head_dim_v": st.sampled_from([1, 3, 8]),
    "causal": st.booleans(),
    "sm_scale": st.sampled_from([None, 0.3]),
    "window": st.sampled_from([(-1, -1), (0, 0), (2, -1), (-1, 1), (1, 0), (0, 2)]),
    "softcap": st.sampled_from([0.0, 0.7, 30.0]),
    "alibi": st.sampled_from([None, "per head", "per sequence"]),
    "sinks": st.booleans(),
    "mask_axes": st.sampled_from([None, (0, 0, 1, 1), (1, 1, 1, 1), (1, 0, 0, 1), (0, 1, 1, 0)]),
    "scales": st.sampled_from([None, "scalar", "per head"]),
    "dtype": dtypes,
    "profile": st.sampled_from(["normal", "one key dominates", "all equal", "near 5e5", "near 65504"]),
    "seed": seeds,
}


def cases(**changed):
    return st.fixed_dictionaries(CASE | changed)


def problem(*, batch, seqlen_q, seqlen_k, heads_kv, group, head_dim, head_dim_v, causal, sm_scale, window,
            softcap, alibi, sinks, mask_axes, scales, dtype, profile, seed):  # fmt: skip
    """Return (q, k, v), the options of attention, and who sees whom (batch, heads, seqlen_q, seqlen_k)."""
    rng, heads = np.random.default_rng(seed), heads_kv * group
    q = rng.standard_normal((batch, seqlen_q, heads, head_dim))
    k = rng.standard_normal((batch, seqlen_k, heads_kv, head_dim))
    v = rng.standard_normal((batch, seqlen_k, heads_kv, head_dim_v))
    if profile == "one key dominates":  # its score is 1e4
        q[..., 0], k[..., 0] = 1, 0
        k[:, seqlen_k // 2 :][:, :1, :, 0] = 1e4 * head_dim**0.5
    elif profile == "all equal":
        k[...] = k[:, :1]
    elif profile == "near 5e5":
        q[..., 0], k[..., 0] = 1000, rng.choice([-500, 500]) * head_dim**0.5
    elif profile == "near 65504":
        q, k, v = (65504 * np.sign(x) * rng.uniform(0.9, 1, x.shape) for x in (q, k, v))
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    largest = float(ml_dtypes.finfo(dtype).max)
    arrays = tuple(np.clip(x, -largest, largest).astype(dtype) for x in (q, k, v))

    options = {"causal": causal, "sm_scale": sm_scale, "window": window, "softcap": softcap}
    if alibi:
        options["alibi_slopes"] = rng.uniform(0.1, 2, heads if alibi == "per head" else (batch, heads))
    if sinks:
        options["sinks"] = rng.standard_normal(heads)
    if scales:
        options["k_scale"] = rng.uniform(0.25, 1, heads_kv if scales == "per head" else ())
        options["v_scale"] = rng.uniform(0.50, 2, heads_kv if scales == "per head" else ())
    visible = np.ones((batch, heads, seqlen_q, seqlen_k), dtype=bool)
    if mask_axes:
        options["mask"] = rng.random(np.where(mask_axes, visible.shape, 1)) < 0.6
        visible &= options["mask"]
    for i, j in np.ndindex(seqlen_q, seqlen_k):
        p = i + seqlen_k - seqlen_q
        left, right = (math.inf if w == -1 else w for w in window)
        visible[:, :, i, j] &= p - left <= j <= p + right and (j <= p or not causal)
    return arrays, options, visible


def naive_attention(arrays, options, visible):
    q, k, v = (x.astype(np.float64) for x in arrays)
    (batch, heads, seqlen_q, seqlen_k), heads_kv = visible.shape, k.shape[2]
    sm_scale = options["sm_scale"] or 1 / math.sqrt(q.shape[3])
    slopes = np.broadcast_to(options.get("alibi_slopes", 0.0), (batch, heads))
    k_scale, v_scale = (np.broadcast_to(options.get(x, 1.0), heads_kv) for x in ("k_scale", "v_scale"))
    out, lse = np.empty((batch, seqlen_q, heads, v.shape[3])), np.empty((batch, seqlen_q, heads))
    for b, i, h in np.ndindex(lse.shape):
        scores, values, g = [], [], h * heads_kv // heads
        for j in np.flatnonzero(visible[b, h, i]):
            s = math.fsum(q[b, i, h] * k[b, j, g]) * k_scale[g] * sm_scale
            if options["softcap"]:
                s = options["softcap"] * math.tanh(s / options["softcap"])
            scores.append(s - slopes[b, h] * abs(i + seqlen_k - seqlen_q - int(j)))
            values.append(v[b, j, g] * v_scale[g])
        if "sinks" in options:
            scores.append(options["sinks"][h])
            values.append(np.zeros(v.shape[3]))
        out[b, i, h], lse[b, i, h] = naive_state(scores, values, v.shape[3])
    return out, lse


@laws
@given(case=cases())
def test_attention_is_the_naive_definition(case):
    arrays, options, visible = problem(**case)
    eta, _, value = bounds(arrays, options)
    expected = naive_attention(arrays, options, visible)
    assert_state(reference.attention(*arrays, **options), expected, 2 * eta * value, eta)


@laws
@given(case=cases(), parts=st.integers(1, 4), sliced=st.booleans())
def test_any_partition_of_the_keys_merges_to_the_whole(case, parts, sliced):
    (q, k, v), options, visible = problem(**case | ({"alibi": None} if sliced else {}))  # it counts positions
    whole = reference.attention(q, k, v, **options)
    eta, size, value = bounds((q, k, v), options)
    sinks = options.pop("sinks", None)
    options |= {"causal": False, "window": (-1, -1)}
    rng, states = np.random.default_rng(case["seed"]), []
    part = rng.integers(0, parts, k.shape[1])  # which piece each key belongs to
    for keep in (part == s for s in rng.permutation(parts)):
        k_s, v_s, mask = (k[:, keep], v[:, keep], visible[..., keep]) if sliced else (k, v, visible & keep)
        states.append(reference.attention(q, k_s, v_s, **options | {"mask": mask}))
    if sinks is not None:
        states.append((np.zeros_like(whole[0]), np.broadcast_to(sinks, whole[1].shape)))
    rho = len(states) * (4 * size + 16) * U
    tol_out = (6 * eta + 4 * len(states) * rho) * value  # eta disturbs the pieces' values and their weights
    assert_state(reference.merge_states(*zip(*states, strict=True)), whole, tol_out, 2 * eta + rho)


@laws
@given(case=cases(softcap=st.just(0.0), scales=st.none()), c=st.sampled_from([0.5, 700.0, -3e5]))
def test_adding_a_constant_to_the_scores_adds_it_to_lse_alone(case, c):
    (q, k, v), options, _ = problem(**case)
    q, k = q.astype(np.float64), k.astype(np.float64)
    options["sm_scale"] = options["sm_scale"] or q.shape[3] ** -0.5
    out, lse = reference.attention(q, k, v, **options)
    options |= {"sinks": options["sinks"] + c} if case["sinks"] else {}
    q = np.concatenate([q, np.ones_like(q[..., :1])], axis=3)
    k = np.concatenate([k, np.full_like(k[..., :1], c / options["sm_scale"])], axis=3)
    eta, _, value = bounds((q, k, v), options)
    assert_state(reference.attention(q, k, v, **options), (out, lse + c), 2 * eta * value, eta)


@laws
@given(case=cases(batch=st.just(2), seqlen_q=st.integers(1, 4), seqlen_k=st.integers(1, 7)))
@pytest.mark.parametrize("into", "kv")
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_and_inf_reach_the_rows_that_see_their_key_and_no_other(case, poison, into):
    (q, k, v), options, visible = problem(**case)
    out, lse = reference.attention(q, k, v, **options)
    eta, _, value = bounds((q, k, v), options)
    bad = np.random.default_rng(case["seed"]).random(k.shape[1]) < 0.4
    {"k": k, "v": v[..., :1]}[into][:, bad] = poison
    hit = visible[..., bad].any(axis=3).transpose(0, 2, 1)
    with np.errstate(invalid="ignore" if hit.any() else "raise"):
        got_out, got_lse = reference.attention(q, k, v, **options)
    if into == "k":
        out[hit], lse[hit] = math.nan, math.nan
    else:
        out[hit, 0] = math.nan  # only the feature that holds it
    known = ~hit | math.isnan(poison)  # a visible infinity may give infinity or NaN
    assert_state((got_out[known], got_lse[known]), (out[known], lse[known]), 2 * eta * value, eta)


@pytest.mark.parametrize(
    ("seqlen_q", "options", "rows"),
    [
        (2, {}, "11111 11111"),
        (2, {"causal": True}, "1111. 11111"),
        (2, {"causal": True, "window": (1, 0)}, "..11. ...11"),
        (2, {"causal": True, "window": (-1, 2)}, "1111. 11111"),
        (2, {"window": (0, 0)}, "...1. ....1"),
        (3, {"window": (0, 1)}, "..11. ...11 ....1"),
        (3, {"window": (2, -1)}, "11111 .1111 ..111"),
        (7, {"causal": True}, "..... ..... 1.... 11... 111.. 1111. 11111"),
        (7, {"window": (0, 0)}, "..... ..... 1.... .1... ..1.. ...1. ....1"),
        (1, {"mask": np.array([False, True, False, False, True])}, ".1..1"),
        (1, {"mask": np.array(False)}, "....."),
    ],
)
def test_which_of_five_keys_each_query_sees(seqlen_q, options, rows):
    q, k, v = np.zeros((1, seqlen_q, 1, 4)), np.zeros((1, 5, 1, 4)), np.eye(5)[None, :, None]
    out, lse = reference.attention(q, k, v, **options)
    seen = np.array([[key == "1" for key in row] for row in rows.split()])
    count = seen.sum(axis=1)
    with np.errstate(divide="ignore"):
        expected = seen / np.maximum(count, 1)[:, None], np.log(count)  # equal scores: the mean, log(count)
    assert_state((out[0, :, 0], lse[0, :, 0]), expected, 4 * U, 4 * U)


@pytest.mark.parametrize("base", [-5e5, 5e5, -1e30, 1e30, -1e300])
def test_no_finite_score_is_too_large_or_too_small(base):
    k, v = np.array([base, base, base - 0.5 * abs(base)])[None, :, None, None], np.eye(3)[None, :, None]
    out, lse = reference.attention(np.ones((1, 1, 1, 1)), k, v)
    assert_state((out.ravel(), lse.ravel()), (np.array([0.5, 0.5, 0]), np.array([base + math.log(2)])), 0, 0)


def test_lengths_of_the_hugging_face_page():  # varlen, causal: queries [10, 3, 1] on keys [0, 1, 7]
    for seqlen_q, seqlen_k, rows_without_key in (10, 0, 10), (3, 1, 2), (1, 7, 0):
        q, k = np.ones((1, seqlen_q, 2, 8)), np.ones((1, seqlen_k, 2, 8))
        out, lse = reference.attention(q, k, k, causal=True)
        empty = np.arange(seqlen_q) < rows_without_key
        assert (out[0, empty] == 0).all()
        assert (lse[0, empty] == -np.inf).all()
        assert (out[0, ~empty] == 1).all()
        assert np.isfinite(lse[0, ~empty]).all()


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 2, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
def test_zero_lengths(batch, seqlen_q, seqlen_k):
    q, k, v = (np.ones((batch, *rest)) for rest in ((seqlen_q, 4, 8), (seqlen_k, 2, 8), (seqlen_k, 2, 5)))
    assert_same_bits(reference.attention(q, k, v), reference.empty_state(batch, seqlen_q, 4, 5))


Q, K, V = np.zeros((2, 3, 4, 64)), np.zeros((2, 5, 2, 64)), np.zeros((2, 5, 2, 8))


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((Q[0], K, V), {}, "q must have 4 dimensions; got 3"),
        ((Q[:1], K, V), {}, "k.shape[0] must equal batch of q (1); got 2"),
        ((Q, K[..., :32], V), {}, "k.shape[3] must equal head_dim of q (64); got 32"),
        ((Q, K, V[:1]), {}, "v.shape[0] must equal batch of q (2); got 1"),
        ((Q, K, V[:, :4]), {}, "v.shape[1] must equal seqlen_k of k (5); got 4"),
        ((Q, K, V[:, :, :1]), {}, "v.shape[2] must equal num_kv_heads of k (2); got 1"),
        ((Q[:, :, :3], K, V), {}, "q.shape[2] must be a multiple of num_kv_heads of k (2); got 3"),
        ((Q[..., :0], K[..., :0], V), {}, "q.shape[3] must be at least 1; got 0"),
        ((Q, K, V), {"window": (-2, 0)}, "window must be (left, right), each -1 or more; got (-2, 0)"),
        ((Q, K, V), {"softcap": -1.0}, "softcap must be 0 (off) or more; got -1.0"),
        ((Q, K, V), {"alibi_slopes": [1, 1]}, "alibi_slopes.shape must be (4,) or (2, 4); got (2,)"),
        ((Q, K, V), {"sinks": [0, 0]}, "sinks.shape must be (4,); got (2,)"),
        ((Q, K, V), {"k_scale": [1]}, "k_scale.shape must be () or (2,); got (1,)"),
        ((Q, K, V), {"v_scale": [[1, 1]]}, "v_scale.shape must be () or (2,); got (1, 2)"),
        ((Q, K, V), {"mask": [True, False]}, "mask.shape must broadcast to (2, 4, 3, 5); got (2,)"),
        ((Q, K, V), {"mask": 1.0}, "mask must be bool; got float64"),
    ],
)
def test_attention_refuses(arrays, options, message):
    error = TypeError if "bool" in message else ValueError
    with pytest.raises(error, match=f"^{re.escape('reference.attention: ' + message)}$"):
        reference.attention(*arrays, **options)
