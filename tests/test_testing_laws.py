"""cuattn.testing: the laws. Sound merges keep them, each planted fault breaks the law that is about it."""

import itertools

import numpy as np
import pytest

from cuattn import testing
from cuattn.testing import StateCase
from tests.imitations import F32, FEW, fused, rounded, zero_if_empty


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
