"""cuattn.testing: bounds against imitations of device arithmetic, comparison, cases, planted faults."""

import importlib
import itertools
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from cuattn import testing
from cuattn.testing import StateCase, strategies
from cuattn.testing.profiles import HAS_EMPTY, as_dtype

F32 = np.float32
EXACT = ("all empty", "first only", "one state dominates")         # here float32 makes no error at all
FEW = settings(max_examples=15, deadline=None, database=None)


# ---- Imitations of device arithmetic: float32 NumPy, one rounding for each operation.

def fused(a, b, c):
    """a * b + c rounded once."""
    return (a.astype(np.float64) * b + c).astype(F32)


def rounded(a, b, c):
    """a * b + c rounded twice."""
    return a * b + c


def exp_base2(x):
    return np.exp2(x * F32(np.log2(np.e)))


def zero_if_empty(lse, x):
    return np.where(np.isneginf(lse), F32(0), x)


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


# ---- Cases, layouts, guard bytes, strategies.

@pytest.mark.parametrize(("layout", "dtype"), list(itertools.product(testing.LAYOUTS, testing.DTYPES)))
def test_layouts_and_guards(layout, dtype):
    case = StateCase((4, 3), 2, 40, dtype, "normal", layout, seed=5)
    plain = StateCase((4, 3), 2, 40, dtype, "normal", "contiguous", seed=5)
    outs, lses = case.outs(), case.lses()
    testing.assert_same_bits(outs, plain.outs())
    testing.assert_same_bits(lses, plain.lses())
    assert outs.strides[-1] == outs.itemsize
    assert eval(repr(case)) == case
    assert "\n" not in repr(case)
    assert layout in ("contiguous", "odd offset") or not outs.flags.c_contiguous
    assert layout != "odd offset" or outs.ctypes.data % 16 == outs.itemsize
    for shape in ((4, 3, 40), (4, 3), (0, 3), ()):
        for xp in (np, fake_cupy()):
            buffer, view = testing.guarded(shape, dtype, layout, xp=xp)
            assert view.shape == shape
            assert np.isnan(testing.to_host(view).astype(F32)).all()
            memory = getattr(buffer, "host", buffer)
            getattr(view, "host", view)[...] = 1
            testing.check_guard(buffer, view)
            memory[len(memory) - 64] = 1                           # the first element behind everything
            with pytest.raises(AssertionError, match="1 elements outside the output"):
                testing.check_guard(buffer, view)


def fake_cupy():
    """As much of CuPy as to_device uses, on host memory."""
    class Array:
        def __init__(self, shape, dtype, memptr, strides):
            self.memory, offset = memptr
            self.host = np.ndarray(shape, dtype, self.memory, offset, strides)
            self.shape, self.dtype, self.strides, self.size = shape, self.host.dtype, strides, self.host.size
            self.data = Pointer((self.memory, offset))

        def get(self):
            return self.host.copy()

    class Pointer(tuple):
        ptr = property(lambda self: self[1])

        def __add__(self, offset):
            return Pointer((self[0], self[1] + offset))

    def asarray(flat):
        assert flat.dtype == np.uint8
        assert flat.ndim == 1
        return Array(flat.shape, np.uint8, Pointer((flat.copy(), 0)), (1,))

    def empty(shape, dtype):
        return Array(shape, dtype, Pointer((np.empty(0, np.uint8), 0)), np.empty(shape, dtype).strides)
    return SimpleNamespace(__name__="cupy", asarray=asarray, ndarray=Array, empty=empty)


@given(case=strategies.state_cases(max_rows=20))
@settings(max_examples=60, deadline=None, database=None)
def test_cases_are_what_they_say_and_move_with_their_strides(case):
    outs, lses, parts = case.outs(), case.lses(), case.parts()
    assert outs.shape == (case.num_states, *case.rows, case.head_dim)
    assert outs.dtype == as_dtype(case.dtype)
    assert lses.shape == outs.shape[:-1]
    assert lses.dtype == F32
    assert len(parts) == case.num_states
    assert not np.isposinf(lses).any()
    assert not np.isnan(lses).any()
    assert case.profile in HAS_EMPTY or not np.isneginf(lses).any()
    expected, total = case.expected()
    assert np.isfinite(expected).all()
    assert (total < np.inf).all()
    for array in (outs, lses, *(x for part in parts for x in part)):
        moved = testing.to_device(array, fake_cupy())
        testing.assert_same_bits(moved.get(), array)
        assert moved.strides == array.strides or array.size == 0


@pytest.mark.parametrize("wanted", [
    lambda c: c.num_states == 0, lambda c: 0 in c.rows,
    lambda c: c.head_dim == 1, lambda c: c.head_dim == 512,
    lambda c: c.rows[-1] == 128 and 0 not in c.rows, lambda c: c.head_dim % 2 == 1 and c.num_states > 4,
    lambda c: c.profile == "tiny" and c.dtype == "bfloat16" and c.layout == "interleaved"])
def test_edges_are_reachable(wanted):
    quick = settings(max_examples=3000, database=None, suppress_health_check=list(HealthCheck))
    find(strategies.state_cases(), wanted, settings=quick)


@given(data=st.data(), n=st.integers(0, 9))
@FEW
def test_partitions_and_indptrs(data, n):
    cuts = data.draw(strategies.partitions(n))
    assert cuts[0] == 0
    assert cuts[-1] == n
    assert list(cuts) == sorted(cuts)
    indptr = data.draw(strategies.indptrs())
    assert indptr[0] == 0
    assert (np.diff(indptr) >= 0).all()
    assert indptr.dtype in (np.int32, np.int64)
    assert 1 <= data.draw(strategies.head_dims()) <= 512
    assert data.draw(strategies.dtypes()) in testing.DTYPES


@pytest.mark.parametrize(("field", "value"), [
    ("dtype", "float64"), ("profile", "odd"), ("layout", "odd"), ("head_dim", 513), ("num_states", -1)])
def test_state_case_refuses(field, value):
    with pytest.raises(ValueError, match="StateCase: "):
        StateCase(**{field: value})


def test_without_hypothesis_the_message_names_the_extra(monkeypatch):
    for name in ("hypothesis", "hypothesis.strategies"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("strategies", "laws"):
        monkeypatch.delitem(sys.modules, f"cuattn.testing.{name}", raising=False)
    for name in ("cuattn.testing.strategies", "cuattn.testing.laws"):
        with pytest.raises(ImportError, match=r"cuattn\[test\]"):
            importlib.import_module(name)


# ---- The laws: sound merges keep them, each planted fault breaks the law that is about it.

def merge(out_a, lse_a, out_b, lse_b, *, add=fused, floor=-np.inf, exp=np.exp, log=np.log, select=True,
          guard=True, normalise=True, swap=False, acc_dtype=F32):
    """Merge in float32; every argument after the states plants a fault or is another sound choice."""
    m = np.maximum(np.maximum(lse_a, lse_b), F32(floor))
    m = zero_if_empty(m, m) if guard else m
    wa, wb = exp(lse_a - m), exp(lse_b - m)
    z = wa + wb
    a, b = (zero_if_empty(lse[..., None], x) if select else x for x, lse in ((out_a, lse_a), (out_b, lse_b)))
    a, b = (x.astype(acc_dtype).astype(F32) for x in ((b, a) if swap else (a, b)))
    acc = add(wb[..., None], b, (wa[..., None] * a).astype(acc_dtype)).astype(acc_dtype).astype(F32)
    out = acc / np.where(z == 0, 1, z)[..., None] if normalise else acc
    return out.astype(out_a.dtype), (m + log(z)).astype(F32)


def changed(**fault):
    return lambda *states: merge(*states, **fault)


def in_place(out_a, lse_a, out_b, lse_b):
    out_a[...], lse = merge(out_a, lse_a, out_b, lse_b)
    return out_a, lse


def unwritten(*states):
    out, lse = merge(*states)
    stale = np.empty_like(out)
    stale[..., :-1] = out[..., :-1]
    return stale, lse


def assumes_contiguous(out_a, lse_a, out_b, lse_b):
    steps = np.empty(out_a.shape, out_a.dtype).strides
    return merge(np.lib.stride_tricks.as_strided(out_a, strides=steps), lse_a, out_b, lse_b)


def rounds_lse_first(out_a, lse_a, out_b, lse_b):
    """Each weight errs by the rounding of the merged lse: 3 percent at 5e5."""
    lse = np.logaddexp(lse_a, lse_b)
    wa, wb = (zero_if_empty(x, np.exp(x - lse))[..., None] for x in (lse_a, lse_b))
    return fused(wb, zero_if_empty(wb, out_b.astype(F32)), wa * out_a.astype(F32)).astype(out_a.dtype), lse


FAULTS = [
    ("base-2 lse", "oracle", changed(exp=np.exp2, log=np.log2)),
    ("finite sentinel", "oracle", changed(floor=-5e4)),
    ("finite sentinel", "identity", changed(floor=-5e4)),
    ("0 * NaN", "poison", changed(select=False)),
    ("no normalisation", "oracle", changed(normalise=False)),
    ("no normalisation", "shift_covariance", changed(normalise=False, floor=0.0)),
    ("float16 accumulation", "oracle", changed(acc_dtype=np.float16)),
    ("float16 accumulation", "partition_invariance", changed(acc_dtype=np.float16)),
    ("swapped weights", "oracle", changed(swap=True)),
    ("no guard against -inf", "empty", changed(guard=False)),
    ("larger lse instead of the sum", "associativity", changed(log=lambda z: np.minimum(np.log(z), 0))),
    ("writes into an input", "inputs_unchanged", in_place),
    ("last element not written", "fully_written", unwritten),
    ("the first argument wins", "commutativity", lambda out_a, lse_a, out_b, lse_b: (out_a, lse_a)),
    ("fused, so not bitwise commutative", "commutativity", merge),
    ("strides assumed", "oracle", assumes_contiguous),
    ("lse rounded before the weights", "oracle", rounds_lse_first),
    ("float64 result", "oracle", lambda *s: (merge(*s)[0].astype(np.float64), merge(*s)[1])),
    ("no pair", "oracle", lambda *s: merge(*s)[0]),
    ("raises", "oracle", lambda *s: 1 / 0),
]


@pytest.mark.parametrize(("law", "faulty"), [f[1:] for f in FAULTS], ids=[f"{f[0]}: {f[1]}" for f in FAULTS])
def test_planted_faults_break_their_law(law, faulty):
    laws = testing.MergeLaws(quietly(faulty), layouts=testing.LAYOUTS, bitwise_commutative=True, settings=FEW)
    with pytest.raises(AssertionError, match=rf"(?s)law '{law}' is broken: .*StateCase\(rows="):
        laws.check(law)


@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_float16_accumulation_is_caught_in_every_dtype(dtype):
    with pytest.raises(AssertionError, match="is broken"):
        testing.check_merge(quietly(changed(acc_dtype=np.float16)), dtypes=[dtype], settings=FEW)


@pytest.mark.parametrize("law", testing.MergeLaws.names())
def test_sound_merge_keeps(law):
    testing.MergeLaws(quietly(merge), layouts=testing.LAYOUTS).check(law)


def test_check_merge_promises_and_ratios():
    ratios = testing.check_merge(quietly(changed(add=rounded)), bitwise_commutative=True, settings=FEW)
    assert 0.05 < ratios["oracle"] <= 1
    assert 0.05 < ratios["partition_invariance"] <= 1

    def flushing(*states):
        flushed = [np.where(abs(x) < x.dtype.type(2.0**-126), x.dtype.type(0), x) for x in states]
        return merge(*flushed)
    with pytest.raises(AssertionError, match=r"(?s)law 'oracle'.*'tiny'"):
        testing.check_merge(quietly(flushing), dtypes=["float32"], settings=FEW)
    testing.check_merge(quietly(flushing), dtypes=["float32"], settings=FEW, flush_subnormals=True)
    tiny = StateCase((9,), 2, 8, "float32", "tiny")
    bounds = testing.merge_bound(tiny.outs(), tiny.lses(), "float32", flush_subnormals=True)
    testing.assert_state(quietly(flushing)(*itertools.chain(*tiny.parts())), tiny.expected(), bounds)


def test_the_definition_keeps_the_laws():
    from cuattn.reference import merge_state

    def definition(out_a, *rest):
        out, lse = merge_state(out_a, *rest)
        return out.astype(out_a.dtype), lse.astype(F32)
    testing.check_merge(definition, dtypes=["float32"], bitwise_commutative=True, settings=FEW)


def quietly(function):
    """The same without NumPy's warnings about -inf - -inf and the like."""
    def silent(*states):
        with np.errstate(all="ignore"):
            return function(*states)
    return silent
