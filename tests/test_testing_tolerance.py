"""cuattn.testing: bounds against imitations of device arithmetic, and the comparison."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cuattn import testing
from cuattn.testing import StateCase
from cuattn.testing.profiles import as_dtype
from tests.imitations import F32, fused, rounded, zero_if_empty

EXACT = ("all empty", "first only", "one state dominates")         # here float32 makes no error at all


# ---- Imitations of device arithmetic: float32 NumPy, one rounding for each operation.

def exp_base2(x):
    return np.exp2(x * F32(np.log2(np.e)))


def online(v, lse, chunk=1, add=fused, exp=np.exp, reciprocal=False):
    """Walk the states in chunks under a running maximum; one chunk of all is the two-pass form."""
    m, z, acc = np.full(lse.shape[1:], -np.inf, F32), np.zeros(lse.shape[1:], F32), np.zeros(v.shape[1:], F32)
    for i in range(0, len(lse), chunk):
        top = np.maximum(m, lse[i:i + chunk].max(0))
        safe = zero_if_empty(top, top)
        scale = zero_if_empty(m, exp(m - safe))
        z, acc, m = z * scale, acc * scale[..., None], top
        for s in range(i, min(i + chunk, len(lse))):
            w = exp(lse[s] - safe)
            z, acc = z + w, add(w[..., None], v[s], acc)
    z1 = np.where(z == 0, F32(1), z)
    out = acc * (1 / z1)[..., None] if reciprocal else acc / z1[..., None]
    return out, m + np.log(z1)


ALGORITHMS = {
    "two passes": lambda v, lse: online(v, lse, chunk=len(lse)),
    "two passes, base 2, reciprocal": lambda v, lse: online(v, lse, len(lse), rounded, exp_base2, True),
    "online": online,
    "online, base 2, reciprocal": lambda v, lse: online(v, lse, 1, rounded, exp_base2, True),
    "chunks of 4": lambda v, lse: online(v, lse, 4),
    "chunks of 4, not fused": lambda v, lse: online(v, lse, 4, rounded),
}


def imitate(algorithm, outs, lses, dtype):
    with np.errstate(all="ignore"):
        out, lse = algorithm(np.where(np.isneginf(lses)[..., None], F32(0), outs.astype(F32)), lses)
        return out.astype(as_dtype(dtype)), lse


def some_cases(profile, number):
    rng = np.random.default_rng(testing.PROFILES.index(profile))
    for i in range(number):
        yield StateCase((int(rng.integers(1, 9)),), int(rng.choice([2, 2, 3, 5, 8, 17])),
                        int(rng.choice([1, 8, 40])), testing.DTYPES[i % 3], profile, seed=i)


@pytest.mark.parametrize("profile", testing.PROFILES)
def test_merge_bound_holds_and_is_not_loose(profile):
    worst = {"float16": 0.0, "bfloat16": 0.0, "float32": 0.0, "lse": 0.0}
    for case in some_cases(profile, 300):
        outs, lses = case.outs(), case.lses()
        expected, bounds = case.expected(), testing.merge_bound(outs, lses, case.dtype)
        for name, algorithm in ALGORITHMS.items():
            got = imitate(algorithm, outs, lses, case.dtype)
            ratio, of_lse = testing.assert_state(
                got, expected, bounds, dtype=case.dtype, name=name, case=case)
            worst[case.dtype] = max(worst[case.dtype], ratio)
            worst["lse"] = max(worst["lse"], of_lse)
    print(profile, worst)
    assert profile in EXACT or min(worst.values()) > 0.05


@pytest.mark.parametrize("profile", testing.PROFILES)
def test_fold_bound_holds_for_every_tree_and_is_not_loose(profile):
    worst = 0.0
    for case in some_cases(profile, 100):
        parts, tree = case.parts(), testing.laws.random_tree(case.num_states, case.seed)

        def walk(node, dtype=case.dtype, parts=parts):
            if not isinstance(node, tuple):
                return parts[node]
            outs, lses = (np.stack(x) for x in zip(*map(walk, node), strict=True))
            return imitate(online, outs, lses, dtype)

        bounds = testing.fold_bound(case.outs(), case.lses(), case.dtype, tree)
        worst = max(worst, *testing.assert_state(walk(tree), case.expected(), bounds, dtype=case.dtype))
    assert profile in EXACT or worst > 0.05


def test_bounds_of_what_must_be_exact_are_zero():
    for profile in ("all empty", "first only"):
        case = StateCase((3,), 4, 8, "float16", profile)
        for bound in (testing.merge_bound, testing.fold_bound):
            assert not any(b.any() for b in bound(case.outs(), case.lses(), "float16"))
    for bound in (testing.merge_bound, testing.fold_bound):
        out, lse = bound(np.zeros((0, 3, 8), F32), np.zeros((0, 3), F32), "float32")
        assert out.shape == (3, 8)
        assert lse.shape == (3,)
        assert not out.any()
        assert not lse.any()
    lses = np.array([[0.0, 0.0, np.nan], [1.0, np.inf, 1.0]], F32)
    out, lse = testing.merge_bound(np.ones((2, 3, 4), F32), lses, "float32")
    assert (lse > 0).tolist() == (out > 0).any(axis=-1).tolist() == [True, False, False]
    assert testing.merge_bound(np.full((1, 1, 1), F32(1 / 3)), np.zeros((1, 1), F32), "float16")[0] > 0


def test_attention_bound_holds():
    rng, worst = np.random.default_rng(0), {}
    for i in range(300):
        dim, n, tile = int(rng.choice([32, 64, 128])), int(rng.integers(1, 514)), int(rng.choice([16, 64]))
        dtype, splits, store = testing.DTYPES[i % 3], int(rng.choice([1, 4])), bool(rng.integers(2))
        p_dtype = dtype if store else None
        q, k, v = (rng.standard_normal(s).astype(as_dtype(dtype)) for s in ((dim,), (n, dim), (n, dim)))
        scale = float(10.0 ** rng.uniform(-3, 1) / dim)
        q32, k32, v32 = (x.astype(F32) for x in (q, k, v))
        score = (k32 * q32).sum(1, dtype=F32) * F32(scale)
        parts = [j for j in np.array_split(np.arange(n), splits) if len(j)]
        states = [tiled(score[j], v32[j], tile, p_dtype) for j in parts]
        out, lse = online(*(np.stack(x) for x in zip(*states, strict=True)), chunk=splits)
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        exact = scale * k @ q
        m = exact.max()
        w = np.exp(exact - m)
        ref = w @ v / w.sum(), np.asarray(m + np.log(w.sum()))
        bounds = testing.attention_bound(
            *ref, head_dim=dim, num_keys=n, tile=tile, sm_scale=scale, qk=(abs(k) @ abs(q)).max(),
            v=abs(v).max(), dtype=dtype, p_dtype=p_dtype, num_splits=splits)
        ratios = testing.assert_state((out.astype(as_dtype(dtype)), lse), ref, bounds, dtype=dtype)
        worst[dtype, store] = max(worst.get((dtype, store), 0.0), *ratios)
    print(worst)
    assert min(worst.values()) > 0.01
    empty = testing.attention_bound(np.zeros((1, 4)), np.full(1, -np.inf), head_dim=4, num_keys=0, tile=16,
                                    sm_scale=1.0, qk=0.0, v=0.0, dtype="float16")
    assert not empty[0].any()
    assert not empty[1].any()


def tiled(score, v, tile, p_dtype):
    """Attention of one query by tiles, the weights rounded to `p_dtype` for the product with v."""
    m, z, acc = F32(-np.inf), F32(0), np.zeros(v.shape[1], F32)
    for j in range(0, len(score), tile):
        top = max(m, score[j:j + tile].max())
        w = np.exp(score[j:j + tile] - top)
        scale, m = np.exp(m - top), top
        z = z * scale + w.sum(dtype=F32)
        p = w if p_dtype is None else w.astype(as_dtype(p_dtype)).astype(F32)
        acc = acc * scale + p @ v[j:j + tile]
    return acc / z, np.asarray(m + np.log(z), F32)


# ---- The comparison.

@pytest.mark.parametrize(("actual", "expected", "message"), [
    ([1.0], np.ones(1), "must be an array; got list"),
    (1.0, np.ones(()), "must be an array; got float"),
    (np.ones(2), np.ones(2, F32), "dtype must be float32; got float64"),
    (np.ones(2, F32), np.ones(2, ml_dtypes.bfloat16), "dtype must be bfloat16; got float32"),
    (np.ones((2, 1)), np.ones(2), r"shape must be \(2,\); got \(2, 1\)"),
    (np.array([1, np.nan]), np.ones(2), r"places of NaN differ in 1 of 2 elements; at \(1,\)"),
    (np.ones(2), np.array([1, np.nan]), "places of NaN differ"),
    (np.array([np.inf]), np.array([-np.inf]), r"places of \+inf differ"),
    (np.array([1.0]), np.array([-np.inf]), "places of -inf differ"),
    (np.array([[1, 1], [1 + 1.01e-3, 2.0]]), np.array([[1.0, 1], [1, np.nextafter(2, 3)]]),
     r"1 of 4 elements exceed the bound; worst at \(1, 0\).*ratio 1.01\n  case: 'the case'"),
    (np.asarray(F32(2)), np.asarray(1.0), r"worst at \(\)"),
])
def test_assert_close_refuses(actual, expected, message):
    with pytest.raises(AssertionError, match=f"x: .*{message}".replace("x: .*must", "x: must")):
        testing.assert_close(actual, expected, 1e-3, name="x", case="the case")


def test_assert_close_measures():
    device = SimpleNamespace(shape=(2,), dtype=np.dtype(F32), get=lambda: np.array([1, 2.5], F32))
    assert testing.assert_close(device, np.array([1.0, 2.0]), [0.0, 2.0]) == 0.25
    assert testing.assert_close(np.zeros((0, 3)), np.zeros((0, 3)), 0.0) == 0.0
    special = np.array([np.nan, np.inf, -np.inf])
    assert testing.assert_close(special, special, np.nan) == 0.0
    for bound in (0.0, np.nan, -1.0):                              # neither allows anything
        with pytest.raises(AssertionError, match="1 of 1 elements"):
            testing.assert_close(np.ones(1), np.zeros(1), bound)


def test_assert_same_bits():
    a = np.array([[0.0, 1.0], [np.nan, 2.0]], F32)
    testing.assert_same_bits(a.T.copy().T, a)
    for dtype in testing.DTYPES:
        b = np.array([0.0, 1.0, 3.0], as_dtype(dtype))
        c = b.copy()
        c[0], c[2] = -0.0, np.nextafter(c[2], as_dtype(dtype).type(4))
        with pytest.raises(AssertionError, match=r"differ in 2 of 3 .*worst at \(2,\).*1 units in the last"):
            testing.assert_same_bits(b, c)
    payload = a.copy()
    payload.view(np.uint32)[1, 0] += 1
    with pytest.raises(AssertionError, match=r"worst at \(1, 0\): .*0x7fc00000.*0x7fc00001"):
        testing.assert_same_bits(a, payload, case="c")
    with pytest.raises(AssertionError, match="dtype or shape differs"):
        testing.assert_same_bits(a, a.astype(np.float64))
