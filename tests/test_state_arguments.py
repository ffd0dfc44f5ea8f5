"""What the merges refuse: the named error, before anything is launched or changed."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuattn
from cuattn import _launch
from cuattn._plan_state import LIST
from cuattn.testing import StateCase, assert_same_bits
from tests.backends import Backend, moved
from tests.engine import EmulatorEngine

CASE = StateCase((4, 2), 3, 16, "float16")


def arguments(backend, **changed):
    """Valid arguments of merge_state, in the place of the backend, some of them changed."""
    (out_a, lse_a), (out_b, lse_b), _ = CASE.parts()
    valid = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    return moved(backend, {**valid, **changed})


def empty(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


f32 = np.float32
TWO = [  # changed arguments of merge_state, error, text
    ({"out_a": None}, TypeError, r"merge_state: out_a must be an array; got None"),
    ({"out_b": [1.0, 2.0]}, TypeError, r"merge_state: out_b must be a NumPy array or an array on a CUDA device; got list"),
    ({"out_a": 3.0}, TypeError, r"out_a must be .* got float"),
    ({"out_a": empty(4, 2, 16, dtype=np.float64)}, TypeError, "out_a must be float16, bfloat16 or float32; got float64"),
    ({"out_a": empty(4, 2, 16, dtype=np.int32)}, TypeError, "out_a must be float16, bfloat16 or float32; got int32"),
    ({"out_b": empty(4, 2, 16, dtype=bfloat16)}, TypeError, "out_b must be float16 or float32; got bfloat16"),
    ({"lse_a": empty(4, 2)}, TypeError, "lse_a must be float32; got float16"),
    ({"lse_b": empty(4, 2, dtype=np.float64)}, TypeError, "lse_b must be float32; got float64"),
    ({"out_a": empty()}, ValueError, r"out_a must have the axes \(\.\.\., head_dim\); got shape \(\)"),
    ({"out_b": empty(4, 3, 16)}, ValueError, r"lse_b.shape must equal out_b.shape\[:-1\] \(4, 3\); got \(4, 2\)"),
    ({"out_b": empty(4, 2, 8)}, ValueError, r"out_b.shape must equal out_a.shape \(4, 2, 16\); got \(4, 2, 8\)"),
    ({"lse_a": empty(2, 4, dtype=f32)}, ValueError, r"lse_a.shape must equal out_a.shape\[:-1\] \(4, 2\); got \(2, 4\)"),
    ({"lse_a": empty(4, 2, 1, dtype=f32)}, ValueError, r"lse_a.shape must equal .* got \(4, 2, 1\)"),
    ({"out_a": empty(4, 2, 0), "out_b": empty(4, 2, 0)}, ValueError, r"out_a.shape\[-1\] \(head_dim\) must be 1 to 512; got 0"),
    ({"out_a": empty(4, 2, 513)}, ValueError, r"head_dim\) must be 1 to 512; got 513"),
    ({"out_a": empty(4, 2, 32)[..., ::2]}, ValueError, r"out_a must be contiguous along its last axis .* got 4"),
    ({"out_a": empty(4, 16, 2).swapaxes(1, 2)}, ValueError, r"out_a must be contiguous along its last axis"),
    ({"out": empty(4, 2, 16, dtype=bfloat16)}, TypeError, "out must be float16 or float32; got bfloat16"),
    ({"out": empty(4, 2, 16, dtype=np.float64)}, TypeError, "out must be float16 or float32; got float64"),
    ({"lse": empty(4, 2)}, TypeError, "lse must be float32; got float16"),
    ({"out": empty(8, 16)}, ValueError, r"out.shape must equal the result's shape \(4, 2, 16\); got \(8, 16\)"),
    ({"lse": empty(4, 1, dtype=f32)}, ValueError, r"lse.shape must equal the result's shape \(4, 2\); got \(4, 1\)"),
    ({"out": np.broadcast_to(empty(16), (4, 2, 16))}, ValueError, "out must not overlap itself"),
    ({"lse": np.broadcast_to(empty(1, dtype=f32), (4, 2))}, ValueError, "lse must not overlap itself"),
]


@pytest.mark.parametrize(("changed", "error", "text"), TWO, ids=[t[2][:60] for t in TWO])
def test_merge_state_refuses(backend, changed, error, text):
    given = arguments(backend, **changed)
    before = {k: backend.host(v).copy() for k, v in given.items() if hasattr(v, "shape")}
    with pytest.raises(error, match=text):
        cuattn.merge_state(**given)
    for name, copy in before.items():
        assert_same_bits(backend.host(given[name]), copy, name=name)


def test_merge_state_in_place_refuses(backend):
    given = arguments(backend)
    in_place = dict(zip(("out", "lse", "other_out", "other_lse"), given.values()))
    with pytest.raises(TypeError, match="merge_state_in_place: mask must be bool; got int32"):
        cuattn.merge_state_in_place(**in_place, mask=backend.array(np.ones(4, np.int32)))
    with pytest.raises(ValueError, match=r"mask.shape must equal \(4,\) or \(4, 2\); got \(2,\)"):
        cuattn.merge_state_in_place(**in_place, mask=backend.array(np.ones(2, bool)))
    with pytest.raises(TypeError, match="merge_state_in_place: other_lse must be float32; got float16"):
        cuattn.merge_state_in_place(**{**in_place, "other_lse": backend.array(empty(4, 2))})


def test_merge_states_refuses(backend):
    outs, lses = backend.array(CASE.outs()), backend.array(CASE.lses())
    with pytest.raises(ValueError, match=r"merge_states: lses.shape must equal outs.shape\[:-1\] \(3, 4, 2\); got \(2, 4, 2\)"):
        cuattn.merge_states(outs, lses[:2])
    with pytest.raises(ValueError, match=r"merge_states: outs must have the axes \(states, \.\.\., head_dim\); got shape \(16,\)"):
        cuattn.merge_states(outs[0, 0, 0], lses[0, 0, :1].reshape(()))
    with pytest.raises(ValueError, match="two lists of one length, at least 1, or two arrays"):
        cuattn.merge_states([], [])
    with pytest.raises(ValueError, match="two lists of one length"):
        cuattn.merge_states(list(outs), list(lses)[:2])
    with pytest.raises(ValueError, match="two lists of one length"):
        cuattn.merge_states(list(outs), lses)
    with pytest.raises(TypeError, match=r"merge_states: outs\[1\] must be an array; got None"):
        cuattn.merge_states([outs[0], None], list(lses)[:2])
    with pytest.raises(ValueError, match=r"outs\[1\].shape must equal outs\[0\].shape \(4, 2, 16\); got \(4, 1, 16\)"):
        cuattn.merge_states([outs[0], outs[1][:, :1]], [lses[0], lses[1][:, :1]])
    wide = backend.array(empty(4, 2, 16, dtype=f32))
    with pytest.raises(TypeError, match=r"merge_states: outs\[1\] must be float16; got float32"):
        cuattn.merge_states([outs[0], wide], list(lses)[:2])


class Capturing(EmulatorEngine):
    """Its stream is being captured; nothing is to be allocated or launched."""

    def capturing(self, device: int) -> bool:
        return True

    def empty(self, *_):
        raise AssertionError("allocated")

    launch = empty


def test_a_captured_list_that_needs_scratch_is_refused_before_anything_is_allocated():
    outs, lses = [empty(4, 16)] * (LIST + 1), [empty(4, dtype=f32)] * (LIST + 1)
    text = "merge_states: a list to be captured in a graph must have at most 32 states; got 33"
    for into in ({}, {"out": empty(4, 16), "lse": empty(4, dtype=f32)}):
        with _launch.emulated(Capturing()), pytest.raises(ValueError, match=text):
            cuattn.merge_states(outs, lses, **into)


def test_five_row_axes_without_a_common_stride_are_refused(backend):
    outs = backend.array(np.zeros((2, 4, 4, 4, 4, 4, 16), f32))[:, ::2, ::2, ::2, ::2, ::2]
    lses = backend.array(np.zeros((2, 2, 2, 2, 2, 2), f32))
    with pytest.raises(ValueError, match="at most 4 row axes may have unrelated strides; got 5"):
        cuattn.merge_states(outs, lses)


@pytest.mark.parametrize("indptr", [[0.0, 3.0], [[0], [3]], []], ids=["float", "two axes", "empty"])
def test_merge_states_varlen_refuses_the_kind_of_indptr(backend, indptr):
    outs, lses = backend.array(CASE.outs()), backend.array(CASE.lses())
    index = np.array(indptr, None if indptr else np.int32)
    with pytest.raises((TypeError, ValueError), match=r"merge_states_varlen: indptr(\.shape\[0\])? must (be int32 or int64|have the axes|be at least 1)"):
        cuattn.merge_states_varlen(outs, lses, backend.array(index))


BIG = 2**63
BAD_OFFSETS = [
    ([BIG - 1, -BIG], r"indptr must be ascending; got 9223372036854775807 before -9223372036854775808 at index 1"),
    ([2**32 - 5, -BIG], r"indptr must be ascending"),
    ([-BIG, BIG - 1], r"indptr\[0\] must be at least 0"),
    ([2**32 + 1, 2**32 + 3], r"indptr\[-1\] must be at most outs.shape\[0\] \(3\)"),
    ([-1, 3], r"indptr\[0\] must be at least 0; got -1"),
    ([0, 2, 1, 3], r"indptr must be ascending; got 2 before 1 at index 2"),
    ([0, 4], r"indptr\[-1\] must be at most outs.shape\[0\] \(3\); got 4"),
]


@pytest.mark.parametrize(("indptr", "text"), BAD_OFFSETS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_bad_offsets_are_refused_under_value_checks_and_harmless_without(backend, indptr, text, dtype):
    """Reported of others: wrong metadata read or wrote stray memory (FlashInfer #320, #919)."""
    if max(map(abs, indptr)) > np.iinfo(dtype).max:
        dtype = np.int64
    outs, lses = CASE.outs(), CASE.lses()
    poisoned = np.full((9, *outs.shape[1:]), np.nan, outs.dtype), np.full((9, *lses.shape[1:]), np.nan, lses.dtype)
    poisoned[0][3:6], poisoned[1][3:6] = outs, lses  # what lies before and behind the stack is NaN
    around = backend.array(poisoned[0]), backend.array(poisoned[1])
    index = backend.array(np.array(indptr, dtype))
    with pytest.raises(ValueError, match=text):
        cuattn.merge_states_varlen(around[0][3:6], around[1][3:6], index)
    if backend.name == "numpy":
        return  # on the host they are checked always
    with cuattn.checking("arguments"):
        state = cuattn.merge_states_varlen(around[0][3:6], around[1][3:6], index)
    assert state.out.shape == (len(indptr) - 1, 4, 2, 16)
    assert not np.isnan(backend.host(state.out).astype(f32)).any()
    assert not np.isnan(backend.host(state.lse)).any()


def test_a_result_across_an_input_is_refused(backend):
    outs, lses = backend.array(np.zeros((5, 2, 16), f32)), backend.array(np.zeros((5, 2), f32))
    a = outs[:4], lses[:4]
    b = backend.array(np.zeros((4, 2, 16), f32)), backend.array(np.zeros((4, 2), f32))
    with pytest.raises(ValueError, match="merge_state: out must be exactly out_a or apart from it; got arrays that overlap"):
        cuattn.merge_state(*a, *b, out=outs[1:])
    with pytest.raises(ValueError, match="merge_state: lse must be exactly lse_a or apart from it"):
        cuattn.merge_state(*a, *b, lse=lses[1:])
    with pytest.raises(ValueError, match="merge_states_varlen: out must be apart from outs"):
        cuattn.merge_states_varlen(outs, lses, backend.array(np.array([0, 1, 2])), out=outs[:2])
    sliding = backend.array(np.ndarray((3, 4, 16), f32, np.zeros(200, f32), strides=(64, 64, 4)))  # begins in the one before
    with pytest.raises(ValueError, match=r"^merge_states: outs, with out in it, must not overlap itself; got shape \(3, 4, 16\)"):
        cuattn.merge_states(sliding, backend.array(np.zeros((3, 4), f32)), out=sliding[1])
    interleaved = backend.array(np.zeros((4, 2, 2, 16), f32))  # extents overlap, elements don't
    cuattn.merge_state(interleaved[:, :, 0], a[1], *b, out=interleaved[:, :, 1])


def test_read_only_results_are_refused():  # CuPy arrays are always writeable
    out = empty(4, 2, 16)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="merge_state: out must be writeable; got a read-only array"):
        cuattn.merge_state(**arguments(Backend()), out=out)
    lse = empty(4, 2, dtype=f32)
    lse.flags.writeable = False
    with pytest.raises(ValueError, match="lse_to_base2: out must be writeable; got a read-only array"):
        cuattn.lse_to_base2(empty(4, 2, dtype=f32), out=lse)


def test_base_2_refuses(backend):
    with pytest.raises(TypeError, match="lse_to_base2: lse must be float32; got float16"):
        cuattn.lse_to_base2(backend.array(empty(3)))
    with pytest.raises(ValueError, match=r"lse_from_base2: out.shape must equal lse.shape \(3,\); got \(2,\)"):
        cuattn.lse_from_base2(backend.array(empty(3, dtype=f32)), out=backend.array(empty(2, dtype=f32)))


def test_empty_like_refuses(backend):
    with pytest.raises(TypeError, match="AttentionState.empty_like: dtype must be float16, bfloat16 or float32; got int64"):
        cuattn.AttentionState.empty_like(backend.array(empty(3, 4)), dtype=np.int64)
