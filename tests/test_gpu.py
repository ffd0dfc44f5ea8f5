"""What only a device can show: sizes past 2^32, streams, graphs, other libraries' arrays, sanitizers. Collected on GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import cupy
import numpy as np
import pytest

import cuattn
import cuattn.numba
from cuattn import _launch, _plan_attention, _plan_state, reference
from cuattn.testing import StateCase, assert_same_bits, assert_state, fold_bound, merge_bound
from cuattn.testing.profiles import DTYPES, as_dtype
from tests.sanitize import CASES

pytestmark = pytest.mark.gpu


def on_gpu(case: StateCase) -> tuple[cupy.ndarray, cupy.ndarray]:
    return tuple(cupy.asarray(np.ascontiguousarray(x).view(np.uint8)).view(x.dtype) for x in (case.outs(), case.lses()))


def random_states(states: int, rows: int, head_dim: int, dtype: str, seed: int = 0):
    """Random states made on the device; the rows can be too many for the host."""
    rng = cupy.random.default_rng(seed)
    outs = cupy.empty((states, rows, head_dim), as_dtype(dtype))
    flat, step = outs.reshape(-1), 1 << 28
    for i in range(0, flat.size, step):
        flat[i : i + step] = rng.standard_normal(min(step, flat.size - i), dtype=cupy.float32)
    lses = cupy.empty((states, rows), cupy.float32)
    for s in range(states):
        for i in range(0, rows, step):
            lses[s, i : i + step] = rng.standard_normal(min(step, rows - i), dtype=cupy.float32)
    return outs, lses


@pytest.mark.parametrize(("rows", "head_dim"), [((1 << 25) + 3, 128), ((1 << 31) + 5, 1)], ids=["elements", "rows"])
def test_past_2_32_elements_and_2_31_rows(rows, head_dim, much_memory):
    """Reported of others: offsets that wrap at 2^32 elements (FlashInfer's merges index with uint32)."""
    outs, lses = random_states(2, rows, head_dim, "bfloat16")
    state = cuattn.merge_state(outs[0], lses[0], outs[1], lses[1])
    stacked = cuattn.merge_states(outs, lses)
    some = np.r_[0:40, rows // 2 : rows // 2 + 40, rows - 40 : rows]
    part = tuple(np.stack([x[s][some].get() for s in range(2)]) for x in (outs, lses))
    for result in (state, stacked):
        got = result.out[some], result.lse[some]
        assert_state(got, reference.merge_states(*part), merge_bound(*part, "bfloat16"), dtype="bfloat16")
    del outs, lses, state, stacked
    cupy.get_default_memory_pool().free_all_blocks()


def test_work_goes_on_the_current_stream():
    """The inputs are written on the same stream just before, behind work that takes a while."""
    case = StateCase((64, 8), 2, 128, "float16")
    parts = [x for s in range(2) for x in (on_gpu(case)[0][s], on_gpu(case)[1][s])]
    late = [cupy.full_like(x, np.nan) for x in parts]
    busy = cupy.random.standard_normal((4096, 4096), dtype=cupy.float32)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(20):
            busy @ busy
        for x, y in zip(late, parts):
            x[...] = y
        state = cuattn.merge_state(*late)
        stream.synchronize()
    assert_same_bits(state.out, cuattn.merge_state(*parts).out)


def test_graph_replay_with_other_values_and_segments():
    """Neither allocation nor synchronisation in a captured region, and offsets are read at replay."""
    outs, lses = random_states(12, 6, 64, "float16")
    indptr = cupy.asarray(np.int32([0, 3, 3, 12]))
    out, lse = cupy.empty((3, 6, 64), np.float16), cupy.empty((3, 6), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with cuattn.checking("arguments"), stream:
        cuattn.merge_states_varlen(outs, lses, indptr, out=out, lse=lse)  # compiles and loads
        pool = cupy.get_default_memory_pool()
        used = pool.used_bytes(), pool.total_bytes()
        stream.begin_capture()
        cuattn.merge_states_varlen(outs, lses, indptr, out=out, lse=lse)
        graph = stream.end_capture()
        assert (pool.used_bytes(), pool.total_bytes()) == used
        for offsets in ([0, 12, 12, 12], [2, 4, 6, 8]):
            indptr.set(np.int32(offsets))
            outs *= np.float16(0.5)
            graph.launch(stream)
            expected = reference.merge_states_varlen(outs.get(), lses.get(), np.int64(offsets))
            for i, (a, b) in enumerate(zip(offsets[:-1], offsets[1:])):
                bound = merge_bound(outs[a:b].get(), lses[a:b].get(), "float16")
                assert_state((out[i], lse[i]), (expected[0][i], expected[1][i]), bound, dtype="float16")


def test_captured_lists_don_t_allocate_and_long_ones_are_refused():
    outs, lses = random_states(33, 6, 64, "float16")
    out, lse = cupy.empty_like(outs[0]), cupy.empty_like(lses[0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cuattn.merge_states(list(outs[:32]), list(lses[:32]), out=out, lse=lse)
        cuattn.merge_state_in_place(out, lse, outs[32], lses[32])
        expected = out.copy()
        out.fill(0)
        stream.begin_capture()
        cuattn.merge_states(list(outs[:32]), list(lses[:32]), out=out, lse=lse)
        cuattn.merge_state_in_place(out, lse, outs[32], lses[32])
        with pytest.raises(ValueError, match="a list to be captured in a graph must have at most 32 states; got 33"):
            cuattn.merge_states(list(outs), list(lses), out=out, lse=lse)
        stream.end_capture().launch(stream)
        assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_runs_give_the_same_bits(dtype):
    outs, lses = random_states(300, 40, 128, dtype)
    first = cuattn.merge_states(outs, lses)
    for _ in range(20):
        again = cuattn.merge_states(outs, lses)
        assert_same_bits(again.out, first.out)
        assert_same_bits(again.lse, first.lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_torch_jax_and_numba_are_taken_without_a_copy(dtype):
    import torch
    from numba import cuda

    case = StateCase((7, 3), 2, 64, dtype)
    outs, lses = on_gpu(case)
    expected = cuattn.merge_state(outs[0], lses[0], outs[1], lses[1])
    torches = [torch.from_dlpack(x) for x in (outs[0], lses[0], outs[1], lses[1])]
    out = torch.empty_like(torches[0])
    state = cuattn.merge_state(*torches, out=out)
    assert isinstance(state.out, cupy.ndarray)
    assert state.out.data.ptr == out.data_ptr()
    assert_same_bits(state.out, expected.out)
    lse = cuda.as_cuda_array(lses[1])
    assert_same_bits(cuattn.merge_state(*torches[:3], lse).out, expected.out)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    jaxes = [jax.dlpack.from_dlpack(x) for x in (outs[0], lses[0], outs[1], lses[1])]
    assert_same_bits(cuattn.merge_state(*jaxes).out, expected.out)


def test_host_and_device_arrays_are_not_mixed():
    outs, lses = on_gpu(StateCase((4,), 2, 8))
    with pytest.raises(TypeError, match="all on the host or all on one device; got out_a on device 0 and lse_a on the host"):
        cuattn.merge_state(outs[0], lses[0].get(), outs[1], lses[1])


if cupy.cuda.runtime.getDeviceCount() > 1:

    def test_the_arrays_decide_the_device_and_not_the_current_one():
        """Reported of others: illegal access with tensors on cuda:1 and cuda:0 current (FlashInfer #349, #452, #924)."""
        case = StateCase((5, 3), 2, 64, "bfloat16")
        with cupy.cuda.Device(1):
            outs, lses = on_gpu(case)
        state = cuattn.merge_state(outs[0], lses[0], outs[1], lses[1])
        assert state.out.device.id == 1
        assert_state(state, case.expected(), merge_bound(case.outs(), case.lses(), case.dtype), dtype=case.dtype)
        empty = cuattn.AttentionState.empty_like(outs[0])
        assert cuattn.lse_to_base2(empty.lse).device.id == empty.out.device.id == 1
        assert_same_bits((empty | (outs[0], lses[0])).out, outs[0])
        here = on_gpu(case)
        with pytest.raises(ValueError, match=r"merge_state: out_b must be on the device of out_a \(1\); got device 0"):
            cuattn.merge_state(outs[0], lses[0], here[0][1], here[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_numba_merges(dtype):
    case = StateCase((5, 3), 7, 40, dtype, "some empty", seed=3)
    outs, lses = on_gpu(case)
    bound = fold_bound(case.outs(), case.lses(), dtype)
    assert_state(cuattn.numba.merge_states(outs, lses), case.expected(), bound, dtype=dtype)
    indptr = cupy.asarray(np.int64([0, 0, 7]))
    state = cuattn.numba.merge_states_varlen(outs[:, 0], lses[:, 0], indptr)
    expected = tuple(x[0] for x in case.expected())
    assert_state((state.out[1], state.lse[1]), expected, tuple(x[0] for x in bound), dtype=dtype)
    assert not state.out[0].astype(np.float32).any() and bool((state.lse[0] == -np.inf).all())
    two = StateCase((5, 3), 2, 40, dtype, seed=4)
    outs, lses = on_gpu(two)
    state = cuattn.numba.merge_state(outs[0], lses[0], outs[1], lses[1])
    assert_state(state, two.expected(), merge_bound(two.outs(), two.lses(), dtype), dtype=dtype)


def test_no_kernel_uses_local_memory():
    """Of merges, and of Hopper's attention where it runs; all others are compiled for each architecture elsewhere."""
    engine, chosen = _launch.cupy_engine(), [*_plan_state.kernels()]
    if engine.info(0).capability == (9, 0):
        chosen += [kernel for kernel in _plan_attention.kernels() if kernel.suffix]
    for kernel in chosen:
        attributes = engine.attributes(kernel, 0)
        assert attributes["local"] == 0, (kernel, attributes)


TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]


def sanitize(tool: str, *what: str) -> subprocess.CompletedProcess[str]:
    checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [checker, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.sanitize", *what]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.sanitizer
@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing(tool, what):
    result = sanitize(tool, what)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "0 errors" in result.stdout or "0 hazards" in result.stdout


@pytest.mark.sanitizer
@pytest.mark.parametrize("tool", TOOLS[:2])
def test_sanitizer_finds_a_planted_fault(tool):
    assert sanitize(tool, f"planted-{tool}").returncode == 9
