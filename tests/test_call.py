"""What a call knows of its arrays, and checks that are done once for all calls alike."""

from __future__ import annotations

import numpy as np
import pytest

from cuattn import _call, _check, _check_decode
from cuattn._call import Call, array_spec, remembered, rounded
from tests.decode_cases import DecodeCase
from tests.device_fakes import on_device

F16, F32 = np.float16, np.float32


@pytest.mark.parametrize("make", [np.zeros, on_device], ids=["host", "device"])
def test_arrays_alike_share_one_spec(make):
    """Checks are looked up by the identity of specs: equal ones that are two objects would be checked again."""
    a, b = make((4, 8), F32), make((4, 8), F32)
    call = Call("f", {"a": a, "b": b, "none": None})
    assert call.specs["a"] is call.specs["b"] is Call("g", {"c": a}).specs["c"]
    assert call.specs["none"] is None and call.specs["a"].shape == (4, 8)
    assert call.places["a"][0] is call.specs["a"] and "none" not in call.places
    assert call.places["b"][1] - call.places["a"][1] == (
        b.ctypes.data - a.ctypes.data if make is np.zeros else b.data.ptr - a.data.ptr
    )
    others = [a[:3], a.T, a[:, ::-1], a[:, 1:5], make((4, 8), F16), make((4, 8), np.int32)]
    assert len({Call("f", {"a": x}).specs["a"] for x in [a, *others]}) == 7
    assert _check.fresh((4, 8), np.dtype(F32)) is array_spec((4, 8), (32, 4), np.dtype(F32), 16)


def test_specs_tell_alignments_apart():
    memory = np.zeros(64, np.uint8)
    start = -memory.ctypes.data % 16
    found = [Call("f", {"a": memory[start + n : start + n + 8]}).specs["a"].alignment for n in range(17)]
    assert found == [16, 1, 2, 1, 4, 1, 2, 1, 8, 1, 2, 1, 4, 1, 2, 1, 16]


@pytest.fixture
def check():
    """A check that notes the calls which it looks at, and refuses those of "bad"."""

    @remembered
    def check(call: Call, option: int) -> tuple:
        check.seen.append((call.function, option))
        if call.function == "bad":
            raise ValueError(f"{call.function}: no")
        return call.function, call.specs["a"], option

    check.seen = []
    return check


def test_a_check_is_done_once_for_calls_alike(check):
    def call(function="f", shape=(3,), dtype=F32, **more):
        return Call(function, {"a": on_device(shape, dtype), "b": None, **more})

    first = check(call(), 1)
    assert check(call(), 1) is first
    others = [(call("g"), 1), (call(shape=(4,)), 1), (call(dtype=F16), 1), (call(b=on_device((3,))), 1), (call(), 2)]
    for other, option in others:
        assert check(other, option) == (other.function, other.specs["a"], option)
        assert check(other, option) == (other.function, other.specs["a"], option)
    assert len(check.seen) == 6


def test_a_refusal_is_not_remembered(check):
    for _ in range(2):
        with pytest.raises(ValueError, match="^bad: no$"):
            check(Call("bad", {"a": np.zeros(3)}), 1)
    assert check.seen == [("bad", 1)] * 2


def test_checks_do_not_remember_without_end(check, monkeypatch):
    monkeypatch.setattr(_call, "_REMEMBERED", 3)
    for n in (0, 1, 2, 0, 1, 2, 3, 3, 0):
        assert check(Call("f", {"a": np.zeros(3)}), n)[2] == n
    assert check.seen == [("f", n) for n in (0, 1, 2, 3, 0)]  # the fourth makes it forget the three before


def test_decode_and_its_plan_share_their_dims():
    """A plan then fits by identity, which is what makes it cheap."""
    names = ("q", "k_pages", "v_pages", "block_table", "cache_seqlens")
    given = DecodeCase((5, 40), 2, (4, 2), (16, 8), 16).arrays()

    def dims(function, window=(-1, -1), **more):
        call = Call(function, {name: given[name] for name in names} | more)
        return _check_decode.decode(call, True, window, False, False, False)

    planned = dims("plan_decode")
    assert dims("decode") is planned
    assert dims("decode", workspace=np.zeros(9, F32), window=[-1, -1]) is planned
    assert dims("decode", window=(3, -1)) is not planned


@pytest.mark.parametrize(("dtype", "largest"), [(F16, 65504), (F32, float(np.finfo(F32).max))])
def test_rounding_beyond_the_range_is_infinite_and_silent(dtype, largest):
    with np.errstate(all="raise"):
        found = rounded(np.array([largest, largest * 1.1, -largest * 1.1, 1 / 3]), np.dtype(dtype))
    assert found.dtype == dtype
    assert found.tolist() == [largest, np.inf, -np.inf, float(dtype(1 / 3))]
