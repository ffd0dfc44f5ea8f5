"""Index arrays of a paged cache, and how they are sent: a fake device copies late and in any order."""

from __future__ import annotations

from array import array
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn._paged_index import Staging, block_table, sender, slot_mapping
from tests.backends import BACKENDS
from tests.paged_contents import small_cache


def test_numpy_arrays_are_handed_out_as_they_are():
    cache = small_cache()
    cache.add_sequence("a", range(6))
    cache.add_sequence("b")
    table, lengths, slots = (
        cache.block_table(["b", "a"]),
        cache.cache_seqlens(["b", "a"]),
        cache.slot_mapping(["b", "a"], [0, 3]),
    )
    assert (table.dtype, lengths.dtype, slots.dtype) == (np.int32, np.int32, np.int64)
    assert (table.tolist(), lengths.tolist(), slots.tolist()) == ([[-1, -1], [0, 1]], [0, 6], [3, 4, 5])
    assert cache.block_table([]).shape == (0, 0) and cache.block_table([], width=3).shape == (0, 3)
    assert cache.cache_seqlens([]).shape == cache.slot_mapping([], 1).shape == (0,)
    assert cache.block_table(["a", "a"], width=4).tolist() == [[0, 1, -1, -1]] * 2
    table[:] = 5  # a copy: the cache's own tables can't be reached
    assert cache.block_table(["a"]).tolist() == [[0, 1]]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=5),
    st.integers(1, 6),
    st.sets(st.integers(0, 30)),
)
def test_slots_of_a_batch_are_those_of_its_tokens(sequences, page_size, final):
    """sglang-jax #20, #1297: wrong for several sequences unless all lengths were multiples of the page."""
    lengths, new = [max(pair) for pair in sequences], [min(pair) for pair in sequences]
    sizes = [-(-length // page_size) for length in lengths]
    tables = [array("i", range(end - size, end)) for size, end in zip(sizes, accumulate(sizes))]
    for table in tables:
        table[: len(table) // 3] = array("i", [-1]) * (len(table) // 3)
    expected = [
        -1 if table[i // page_size] in {*final, -1} else table[i // page_size] * page_size + i % page_size
        for table, length, n in zip(tables, lengths, new)
        for i in range(length - n, length)
    ]
    slots = slot_mapping(tables, lengths, new, page_size, final)
    assert slots.dtype == np.int64 and slots.tolist() == expected
    rows = block_table(tables, 21)
    assert [row[: len(table)].tolist() for row, table in zip(rows, tables)] == [
        table.tolist() for table in tables
    ]
    assert all((row[len(table) :] == -1).all() for row, table in zip(rows, tables))


def test_slots_past_2_31():
    """vLLM #1486: 64K pages overflowed an int32 slot mapping; nano-vllm's slots are int32 too."""
    assert slot_mapping([array("i", [2**31 - 1])], [1], [1], 2**20, ()).tolist() == [(2**31 - 1) * 2**20]


class LateDevice:
    """Copies only when told, as a stream that is behind does; reads the buffer at that moment."""

    def __init__(self):
        self.buffers, self.queue = [], []

    def pinned(self, num_bytes):
        self.buffers.append(np.zeros(num_bytes, np.uint8))
        return self.buffers[-1]

    def copy(self, buffer, like):
        result, fence = np.empty(like.shape, like.dtype), Fence()
        self.queue.append((buffer, result, fence))
        return result, fence

    def run(self, place=0):
        buffer, result, fence = self.queue.pop(place)
        result.view(np.uint8).reshape(-1)[:] = buffer[: result.nbytes]
        fence.done = True


class Fence:
    done = False


@given(st.lists(st.integers(0, 400) | st.just(-1), max_size=40), st.randoms(use_true_random=False))
def test_a_buffer_is_not_overwritten_before_its_copy_has_run(steps, random):
    """TensorRT-LLM PR #15546: a pinned buffer was filled again before the copy from it ran."""
    device = LateDevice()
    send, sent = Staging(device), []
    most = 0
    for number, size in enumerate(steps):
        if size >= 0:
            values = np.full((size, 2), number, np.int32)
            sent.append((values, send(values)))
            most = max(most, len(device.queue))
        elif device.queue:
            device.run(random.randrange(len(device.queue)))
    while device.queue:
        device.run()
    for values, result in sent:
        assert result.shape == values.shape and (result == values).all()
    assert (
        len(device.buffers) <= most * 4
    )  # at most one for each copy in flight, of each of the four sizes here


def test_buffers_are_used_again():
    device = LateDevice()
    send = Staging(device)
    for _ in range(50):
        for size in (1, 100, 30):
            send(np.zeros((3, size))[:, ::2])
        while device.queue:
            device.run()
    assert sorted(buffer.nbytes for buffer in device.buffers) == [256, 512, 2048]


def test_strided_values_are_sent():
    device = LateDevice()
    values = np.arange(12).reshape(3, 4).T[::2]
    result = Staging(device)(values)
    device.run()
    assert result.tolist() == values.tolist()


if "gpu" in BACKENDS:

    @pytest.mark.gpu
    def test_a_busy_stream_is_not_waited_for():
        import cupy

        stream, busy = cupy.cuda.Stream(non_blocking=True), cupy.random.rand(4096, 4096)
        cache = small_cache(num_pages=64, xp=cupy)
        cache.add_sequence(0, range(9))
        sender(cupy)(np.zeros(1))  # the first pinned memory is allocated here
        with stream:
            for _ in range(50):
                busy = busy @ busy / 4096
            results = [cache.block_table([0], width=3 + i) for i in range(8)]
            assert not stream.done
        stream.synchronize()
        assert [r.tolist() for r in results] == [[[0, 1, 2, *[-1] * i]] for i in range(8)]
