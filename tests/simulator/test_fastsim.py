"""The simulator of these tests itself: warps, barriers, and what it says when a kernel fails or hangs."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import cuda

from tests.simulator import fastsim
from tests.simulator.fastsim import FULL_MASK, thread_order

LANES = np.arange(32)


def launch(threads, body, *args, dtype=np.int64, blocks=1):
    """One value per thread: ``out[block, thread] = body(thread, *args)``."""

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        out[cuda.blockIdx.x, t] = body(t, *args)

    out = np.zeros((blocks, threads), dtype)
    kernel[blocks, threads](out)
    return out[0] if blocks == 1 else out


# Warp operations


@pytest.mark.parametrize("operand", [0, 1, 7, 31, 33])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("shfl_sync", lambda n: np.full(32, n % 32)),
        ("shfl_up_sync", lambda n: np.where(n % 32 <= LANES, LANES - n % 32, LANES)),
        ("shfl_down_sync", lambda n: np.where(LANES + n % 32 < 32, LANES + n % 32, LANES)),
        ("shfl_xor_sync", lambda n: LANES ^ n % 32),
    ],
)
def test_shuffles(name, expected, operand):
    warps = launch(64, lambda t: getattr(cuda, name)(FULL_MASK, t, operand)).reshape(2, 32)
    np.testing.assert_array_equal(warps, [expected(operand), 32 + expected(operand)])


def test_shuffles_keep_the_type():
    kept = launch(32, lambda t: cuda.shfl_sync(FULL_MASK, np.float32(0.1), 0) == np.float32(0.1))
    assert kept.all()


@pytest.mark.parametrize(
    ("value", "unlike"), [(np.float32(1), np.isnan), (np.int32(1), lambda x: x not in (-1, 0, 1))]
)
def test_a_lane_that_takes_no_part_gives_no_usable_value(value, unlike):
    read = launch(16, lambda t: cuda.shfl_down_sync(FULL_MASK, value, 8), dtype=value.dtype)
    assert (read[:8] == 1).all()
    assert all(map(unlike, read[8:]))


@pytest.mark.parametrize(
    ("chosen", "threads"), [([], 32), ([0], 32), ([31], 32), ([0, 9], 10), (range(32), 32), (range(10), 10)]
)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ballot_sync", lambda chosen, threads: sum(1 << n for n in chosen)),
        ("any_sync", lambda chosen, threads: len(chosen) > 0),
        ("all_sync", lambda chosen, threads: len(chosen) == threads),
        ("eq_sync", lambda chosen, threads: len(chosen) in (0, threads)),
    ],
)
def test_votes(name, expected, chosen, threads):
    votes = launch(threads, lambda t: getattr(cuda, name)(FULL_MASK, t in chosen))
    np.testing.assert_array_equal(votes, expected(chosen, threads))


def test_warps_vote_apart():
    votes = launch(64, lambda t: cuda.ballot_sync(FULL_MASK, t < 33))
    np.testing.assert_array_equal(votes, [FULL_MASK] * 32 + [1] * 32)


def test_a_mask_names_who_meets():
    def halves(t):
        if t < 16:
            return cuda.ballot_sync(0x0000FFFF, t % 2)
        return cuda.ballot_sync(0xFFFF0000, True)

    np.testing.assert_array_equal(launch(32, halves), [0x0000AAAA] * 16 + [0xFFFF0000] * 16)


def test_a_mask_must_name_the_caller():
    with pytest.raises(ValueError, match=r"tid=\[3, 0, 0\] .*mask 0x7 must name the calling lane 3"):
        launch(4, lambda t: cuda.ballot_sync(0x7, True))


def test_a_lane_that_has_ended_is_not_waited_for():
    def body(t):
        if t >= 20:
            return -1
        return cuda.ballot_sync(FULL_MASK, True)

    np.testing.assert_array_equal(launch(32, body), [(1 << 20) - 1] * 20 + [-1] * 12)


def test_a_sum_over_a_warp():
    def body(t):
        total = np.float32(t)
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_xor_sync(FULL_MASK, total, step)
        return total

    np.testing.assert_array_equal(launch(64, body, dtype=np.float32), [496] * 32 + [496 + 32 * 32] * 32)


# Barriers and the order of threads


@cuda.jit
def from_the_neighbour(out, with_barrier):
    shared = cuda.shared.array(64, np.int64)
    t = cuda.threadIdx.x
    shared[t] = -1
    cuda.syncthreads()
    shared[t] = t
    if with_barrier:
        cuda.syncthreads()
    out[t] = shared[(t + 1) % 64]


@pytest.mark.parametrize(("order", "late"), [("forward", range(63)), ("reverse", [63])])
def test_a_barrier_makes_writes_visible_and_a_missing_one_shows(order, late):
    with_barrier, without = np.zeros(64, np.int64), np.zeros(64, np.int64)
    with thread_order(order):
        from_the_neighbour[1, 64](with_barrier, True)
        from_the_neighbour[1, 64](without, False)
    np.testing.assert_array_equal(with_barrier, np.roll(np.arange(64), -1))
    np.testing.assert_array_equal(np.flatnonzero(without == -1), late)


def test_a_warp_barrier_does_not_wait_for_the_block():
    def body(t):
        if t < 32:
            cuda.syncwarp()
        cuda.syncthreads()
        return t

    np.testing.assert_array_equal(launch(64, body), np.arange(64))


def test_a_warp_barrier_makes_writes_visible():
    order = []

    def body(t):
        order.append(("before", t))
        cuda.syncwarp()
        order.append(("after", t))
        return t

    launch(32, body)
    assert order == [(when, t) for when in ("before", "after") for t in range(32)]


def test_there_are_two_orders():
    with pytest.raises(KeyError), thread_order("sideways"):
        pass


def test_votes_of_a_block():
    def body(t):
        count, every = cuda.syncthreads_count(t < 40), cuda.syncthreads_and(t < 40)
        return 100 * count + 10 * every + cuda.syncthreads_or(t == 40)

    assert (launch(48, body) == 4001).all()
    assert (launch(40, body) == 4010).all()


def test_three_dimensions_and_many_blocks():
    @cuda.jit
    def kernel(out):
        x, y, z = cuda.threadIdx.x, cuda.threadIdx.y, cuda.threadIdx.z
        out[cuda.blockIdx.x, cuda.blockIdx.y, x, y, z] = cuda.shfl_xor_sync(FULL_MASK, cuda.laneid, 1)

    out = np.full((3, 2, 4, 4, 2), -1)
    kernel[(3, 2), (4, 4, 2)](out)
    x, y, z = np.indices((4, 4, 2))
    np.testing.assert_array_equal(out, np.broadcast_to((x + 4 * (y + 4 * z)) ^ 1, out.shape))


def test_a_barrier_in_a_device_function_of_another_module():
    source = "def meet(t):\n    cuda.syncthreads()\n    return cuda.threadIdx.x + t\n"
    names = {"cuda": cuda}
    exec(source, names)
    meet = cuda.jit(device=True)(names["meet"])
    np.testing.assert_array_equal(launch(8, lambda t: meet(t)), 2 * np.arange(8))
    assert names["cuda"] is cuda


def test_a_barrier_is_cheap():
    def body(t):
        for _ in range(100):
            cuda.syncthreads()
        return t

    start = time.perf_counter()
    launch(64, body)
    assert time.perf_counter() - start < 5  # 6400 waits: Numba's own simulator takes 10 s or more


# What goes wrong is reported


def test_a_barrier_that_some_never_reach():
    def body(t):
        if t % 2:
            cuda.syncthreads()
        else:
            cuda.syncwarp()
        return t

    expected = (
        "deadlock in block ctaid=[0, 0, 0]: threads wait for each other: "
        "16 in syncwarp of warp 0, mask 0xffffffff, the first tid=[0, 0, 0]; "
        "20 in syncthreads, the first tid=[1, 0, 0]; "
        "4 in syncwarp of warp 1, mask 0xffffffff, the first tid=[32, 0, 0]"
    )
    with pytest.raises(fastsim.Deadlock, match=re.escape(expected)):
        launch(40, body)


@pytest.mark.parametrize(
    "last",
    [
        lambda: cuda.ballot_sync(FULL_MASK, True),  # another operation
        lambda: cuda.shfl_sync(0xFFFFFFFE, 1, 0),  # another mask
        lambda: cuda.syncthreads_count(True),  # another kind of barrier
    ],
)
def test_different_meetings_do_not_meet(last):
    with pytest.raises(fastsim.Deadlock, match=r"31 in shfl_sync of warp 0, mask 0xffffffff, .*; 1 in"):
        launch(32, lambda t: last() if t == 31 else cuda.shfl_sync(FULL_MASK, 1, 0))


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_exceptions_carry_the_thread(order):
    def body(t):
        cuda.syncthreads()
        if t == 5 and cuda.blockIdx.x == 1:
            raise ZeroDivisionError("no")
        cuda.syncthreads()
        return t

    message = r"^tid=\[5, 0, 0\] ctaid=\[1, 0, 0\]: no$"
    with thread_order(order), pytest.raises(ZeroDivisionError, match=message):
        launch(8, body, blocks=2)
    np.testing.assert_array_equal(launch(8, lambda t: t), np.arange(8))  # the next launch is not disturbed


def test_a_failed_launch_ends_its_threads():
    ended = []

    def body(t):
        try:
            if t == 3:
                raise ValueError
            cuda.syncthreads()
        finally:
            ended.append(t)

    with pytest.raises(ValueError, match=r"^tid=\[3, 0, 0\] ctaid=\[0, 0, 0\]$") as caught:
        launch(8, body)
    assert (sorted(ended), caught.type) == ([0, 1, 2, 3], ValueError)  # the others never began


def test_an_index_outside_is_an_error():
    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x] = 1

    with pytest.raises(IndexError, match=r"tid=\[3, 0, 0\] ctaid=\[0, 0, 0\]: index 3 is out of bounds"):
        kernel[1, 4](np.zeros(3))


def test_settings_around_a_launch_hold_inside():
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError, match="divide by zero"):
        launch(1, lambda t: np.float32(1) / np.float32(t))


def test_warp_operations_need_a_kernel():
    with pytest.raises(AttributeError):
        cuda.syncwarp()


def test_other_threads_of_the_process_are_left_alone():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: launch(4, lambda t: cuda.syncthreads_count(True))[0]).result() == 4
