"""apply_rotary on every backend: against the definition, by its laws, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cuattn
from cuattn import _launch, _plan_rotary, reference
from cuattn._call import Call
from cuattn._check_rotary import apply
from cuattn.paged import append_kv
from cuattn.rotary import apply_rotary
from cuattn.testing import assert_close, assert_same_bits, check_guard, place
from cuattn.testing.profiles import as_dtype
from cuattn.testing.tolerance import U, half_subnormal, unit_roundoff
from tests.backends import moved
from tests.decode_cases import rotated_size
from tests.engine import EmulatorEngine
from tests.test_compile import DTYPES, types_of

LAYOUTS = ("contiguous", "row slice", "head major", "odd offset", "padded head_dim")
ROWS = 50  # positions of the tables


@dataclass(frozen=True)
class RotaryCase:
    """Tokens, positions and tables."""

    tokens: tuple[int, ...] = (3, 4)
    heads: int = 2
    head_dim: int = 64
    half: int = 32
    dtype: str = "float16"
    wide: bool = True
    interleaved: bool = False
    layout: str = "contiguous"
    index: str = "int64"
    seed: int = 0

    def arrays(self) -> dict:
        rng, dtype = np.random.default_rng(self.seed), as_dtype(self.dtype)
        x = place(4 * rng.standard_normal((*self.tokens, self.heads, self.head_dim)).astype(dtype), self.layout)
        angles = rng.uniform(0, 7, (ROWS, self.half))
        cos, sin = (place(f(angles).astype(np.float32 if self.wide else dtype), "row slice") for f in (np.cos, np.sin))
        at = rng.integers(0, ROWS, self.tokens).astype(self.index)
        return {"x": x, "cos": cos, "sin": sin, "positions": np.repeat(at, 2, -1)[..., ::2] if at.ndim else at, "interleaved": self.interleaved}


# Vectors of 16 bytes and lone elements; all of head_dim, a part of it, and one pair.
WIDTHS = [(64, 32), (128, 64), (80, 16), (48, 12), (2, 1), (17, 8), (512, 256), (96, 1), (256, 8)]
CASES = st.builds(
    lambda widths, **rest: RotaryCase(head_dim=widths[0], half=widths[1], **rest),
    st.sampled_from(WIDTHS),
    tokens=st.sampled_from([(), (1,), (7,), (0,), (3, 4), (2, 0, 3), (2, 3, 2), (40,)]),
    heads=st.sampled_from([1, 2, 3, 0]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    wide=st.booleans(),
    interleaved=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    index=st.sampled_from(["int32", "int64"]),
    seed=st.integers(0, 99),
)


def check(case: RotaryCase, got) -> None:
    given = case.arrays()
    x, at, style = given["x"].astype(float), given["positions"], {"interleaved": case.interleaved}
    exact = reference.apply_rotary(**given)
    size = rotated_size(x, given["cos"], given["sin"], at, style)
    rounding = unit_roundoff(case.dtype)
    bound = 3 * U * size * (1 + 2 * rounding) + rounding * abs(exact) + half_subnormal(case.dtype)
    assert_close(got, exact, bound, dtype=case.dtype, case=case)


@given(case=CASES)
@example(case=RotaryCase(head_dim=128, half=64, dtype="bfloat16", layout="head major"))
@example(case=RotaryCase(tokens=(300,), heads=3, head_dim=510, half=200, interleaved=True))  # more vectors than a block has threads
def test_rotation_is_the_definition_within_rounding(backend, case):
    given = case.arrays()
    got = apply_rotary(**moved(backend, given))
    check(case, got)
    stays = 2 * case.half
    assert_same_bits(backend.host(got)[..., stays:], given["x"][..., stays:], case=case)


@given(case=CASES)
@example(case=RotaryCase(head_dim=128, half=64))
def test_in_place_and_into_another_array_have_the_same_bits(backend, case):
    expected = apply_rotary(**moved(backend, case.arrays()))
    guard, out = backend.guarded(expected.shape, case.dtype, case.layout)
    assert apply_rotary(**moved(backend, case.arrays()), out=out) is out
    assert_same_bits(out, expected, case=case)
    check_guard(guard, out)
    there = moved(backend, case.arrays())
    assert apply_rotary(**there, out=there["x"]) is there["x"]
    assert_same_bits(there["x"], expected, case=case)


# Laws


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_layout_and_vectors_change_no_bit_and_append_stores_the_same(backend, dtype, wide, interleaved):
    case = RotaryCase((12,), 3, 64, 16, dtype, wide, interleaved)
    first = backend.host(apply_rotary(**moved(backend, case.arrays())))
    for layout in LAYOUTS[1:]:
        given = case.arrays()
        other = {"x": place(np.ascontiguousarray(given["x"]), layout), "sin": place(np.ascontiguousarray(given["sin"]), "odd offset")}
        assert_same_bits(apply_rotary(**moved(backend, given | other)), first, name=layout)
    there = moved(backend, case.arrays())
    pages = backend.array(np.zeros((2, 2, 6, 3, 64), first.dtype))
    tables = {"rotary_cos": there["cos"], "rotary_sin": there["sin"], "positions": there["positions"]}
    append_kv(there["x"], there["x"], *pages, backend.array(np.arange(12)), **tables, rotary_interleaved=interleaved)
    assert_same_bits(backend.host(pages[0]).reshape(first.shape), first)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_positions_are_those_of_the_token_whatever_its_axes(backend, dtype):
    """Positions may be a broadcast view; heads share one."""
    case = RotaryCase((3, 5), 2, 32, 8, dtype)
    given = case.arrays() | {"positions": np.broadcast_to(np.arange(5, dtype=np.int32), (3, 5))}
    got = backend.host(apply_rotary(**moved(backend, given)))
    for b in range(3):
        for h in range(2):
            one = given | {"x": given["x"][b, :, h : h + 1], "positions": np.arange(5)}
            assert_same_bits(apply_rotary(**moved(backend, one)), got[b, :, h : h + 1])


def test_position_0_changes_no_bit(backend):
    x = np.array([0x3C00, 0x7BFF, 0x0001, 0xBC00], np.uint16).view(np.float16).reshape(1, 1, 4)
    tables = np.array([[1, 1]], np.float32), np.array([[0, 0]], np.float32)
    assert_same_bits(apply_rotary(*map(backend.array, (x, *tables)), backend.array(np.array([0]))), x)


# What is wrong


@pytest.mark.parametrize("wrong", [ROWS, -1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_without_a_row_are_refused_under_value_checks_and_rotate_nothing_without(backend, interleaved, in_place, wrong):
    case = RotaryCase(head_dim=64, half=16, interleaved=interleaved, index="int32")
    given = case.arrays()
    given["positions"][1, 2] = wrong
    there = moved(backend, given)
    with pytest.raises(ValueError, match=rf"apply_rotary: positions\[1, 2\] must be 0 or more and below cos.shape\[0\] \({ROWS}\); got {wrong}"):
        apply_rotary(**there)
    assert_same_bits(there["x"], case.arrays()["x"])
    if backend.name == "numpy":
        return
    with cuattn.checking("arguments"):
        got = backend.host(apply_rotary(**there, out=there["x"] if in_place else None))
    expected = backend.host(apply_rotary(**moved(backend, case.arrays()))).copy()
    expected[1, 2] = case.arrays()["x"][1, 2]
    assert_same_bits(got, expected)


def zeros(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


REFUSED = [  # changed arguments, error, text
    ({"x": None}, TypeError, "apply_rotary: x must be an array; got None"),
    ({"positions": [1]}, TypeError, "apply_rotary: positions must be a NumPy array or an array on a CUDA device; got list"),
    ({"x": zeros(3, 4, 2, 64, dtype=np.float64)}, TypeError, "apply_rotary: x must be float16, bfloat16 or float32; got float64"),
    ({"x": zeros(64)}, ValueError, r"apply_rotary: x must have the axes \(..., num_heads, head_dim\); got shape \(64,\)"),
    ({"x": zeros(3, 4, 2, 128)[..., ::2]}, ValueError, "apply_rotary: x must be contiguous along its last axis"),
    ({"x": zeros(3, 4, 2, 513)}, ValueError, r"apply_rotary: x.shape\[-1\] \(head_dim\) must be 1 to 512; got 513"),
    ({"cos": zeros(ROWS, 32, dtype=np.float64)}, TypeError, "apply_rotary: cos must be float16 or float32; got float64"),
    ({"sin": zeros(ROWS, 32)}, TypeError, "apply_rotary: sin must be float32; got float16"),
    ({"cos": zeros(32, dtype=np.float32)}, ValueError, r"apply_rotary: cos must have the axes \(max_positions, rotary_dim / 2\)"),
    ({"sin": zeros(ROWS, 31, dtype=np.float32)}, ValueError, rf"apply_rotary: sin.shape must equal cos.shape \({ROWS}, 32\); got \({ROWS}, 31\)"),
    ({"cos": zeros(4, 33), "sin": zeros(4, 33)}, ValueError, r"apply_rotary: cos.shape\[1\] \(rotary_dim / 2\) must be 1 to head_dim / 2 \(32\); got 33"),
    ({"cos": zeros(4, 0), "sin": zeros(4, 0)}, ValueError, r"apply_rotary: cos.shape\[1\] \(rotary_dim / 2\) must be 1 to head_dim / 2 \(32\); got 0"),
    ({"positions": zeros(3, 4, dtype=np.uint8)}, TypeError, "apply_rotary: positions must be int32 or int64; got uint8"),
    ({"positions": zeros(4, dtype=np.int32)}, ValueError, r"apply_rotary: positions.shape must equal x.shape\[:-2\] \(3, 4\); got \(4,\)"),
    ({"out": zeros(3, 4, 2, 64, dtype=np.float32)}, TypeError, "apply_rotary: out must be float16; got float32"),
    ({"out": zeros(3, 4, 1, 64)}, ValueError, r"apply_rotary: out.shape must equal x.shape \(3, 4, 2, 64\); got \(3, 4, 1, 64\)"),
    ({"out": np.broadcast_to(zeros(64), (3, 4, 2, 64))}, ValueError, "apply_rotary: out must not overlap itself"),
]


@pytest.mark.parametrize(("changed", "error", "text"), REFUSED, ids=[t[2][:60] for t in REFUSED])
def test_apply_rotary_refuses(backend, changed, error, text):
    with pytest.raises(error, match=text):
        apply_rotary(**moved(backend, RotaryCase().arrays() | changed))


def test_results_across_inputs_are_refused(backend):
    given = moved(backend, RotaryCase((6,)).arrays())
    memory = backend.array(zeros(7, 2, 64))
    with pytest.raises(ValueError, match="apply_rotary: out must be exactly x or apart from it; got arrays that overlap"):
        apply_rotary(**given | {"x": memory[:6]}, out=memory[1:])
    table = backend.array(zeros(ROWS, 32))
    with pytest.raises(ValueError, match="apply_rotary: out must be apart from cos; got arrays that overlap"):
        apply_rotary(given["x"], table, backend.array(zeros(ROWS, 32)), given["positions"], out=table[:24].reshape(6, 2, 64))


# Plans


def planned(case: RotaryCase):
    given = case.arrays()
    with _launch.emulated(EmulatorEngine()):
        call = Call("apply_rotary", {name: given.get(name) for name in ("x", "cos", "sin", "positions", "out")})
        return _plan_rotary.plan_rotary(apply(call, False, False), call.info())


@pytest.mark.parametrize("kernel", [*_plan_rotary.kernels()], ids=str)
def test_compiled_kernels_are_chosen(kernel):
    case = RotaryCase(dtype=np.dtype(DTYPES[types_of(kernel)[0]]).name, half=32 if dict(kernel.defines)["VEC"] > 1 else 31)
    assert planned(case).kernel == kernel


def test_plans_cover_every_row_and_vector():
    compiled = set(_plan_rotary.kernels())
    for n, (head_dim, half) in enumerate(WIDTHS):
        for layout in LAYOUTS:
            case = RotaryCase((n + 1, 7), 3, head_dim, half, ("float16", "float32")[n % 2], layout=layout)
            plan = planned(case)
            vec = dict(plan.kernel.defines)["VEC"]
            assert plan.kernel in compiled and plan.block[0] * plan.block[1] <= 128
            assert plan.grid[1] * plan.block[0] * vec >= head_dim - half
            assert plan.grid[0] * plan.block[1] >= (n + 1) * 21
            assert vec == 1 or layout != "odd offset"
