"""What only a device can show of attention: graphs, streams, other devices, many items of work. Collected on GPUs."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

import cuattn
from cuattn import _launch
from cuattn.decode import decode
from cuattn.paged import append_kv
from cuattn.testing import assert_same_bits, assert_state
from tests.attention_cases import AttentionCase, bounds, expected_of, run
from tests.backends import Gpu, moved
from tests.decode_cases import DecodeCase

pytestmark = pytest.mark.gpu
GPU = Gpu()


def many_items(length: int, head_dim: int, kind: str = "packed") -> dict:
    """More tiles of rows than a device has multiprocessors, several times."""
    return AttentionCase(((length, length), (130, 700)), kind, (16, 2), (head_dim, head_dim), 16, "bfloat16", control=1).arrays()


@pytest.mark.parametrize("kind", ["packed", "pages"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_blocks_that_take_many_items(head_dim, kind):
    given = many_items(1500, head_dim, kind)
    some = np.r_[0:3, 740:760, 1498:1503, 1627:1630]
    expected = expected_of(given)
    state, limit = run(GPU, given), bounds(given, expected, "bfloat16")
    assert_state([x[some] for x in state], [x[some] for x in expected], [x[some] for x in limit], dtype="bfloat16")
    again = run(GPU, given)
    assert_same_bits(state.out, again.out)
    assert_same_bits(state.lse, again.lse)


@pytest.mark.parametrize("control", [0, 1, 3])
@pytest.mark.parametrize("kind", ["packed", "pages"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_short_sequences(head_dim, kind, control):
    """Items of no, one and a few tiles of keys behind each other in one block."""
    rng = np.random.default_rng(head_dim)
    lengths = tuple((int(n), int(n) + int(more)) for n, more in zip(rng.integers(0, 260, 40), rng.integers(-40, 300, 40)))
    given = AttentionCase(tuple((q, max(k, 0)) for q, k in lengths), kind, (6, 2), (head_dim, head_dim), 16, "float16", control=control).arrays()
    expected = expected_of(given)
    assert_state(run(GPU, given), expected, bounds(given, expected, "float16"), dtype="float16")


def test_streams_side_by_side():
    """Each has a counter of its own: what one takes, the other does not miss."""
    calls = [moved(GPU, many_items(n, 128)) for n in (2000, 3000)]
    alone = [cuattn.attention_varlen(**call) for call in calls]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in calls]
    cupy.cuda.Device().synchronize()
    results = []
    with cuattn.checking("arguments"):                     # looking at values would make one wait for the other
        for _ in range(20):
            for stream, call in zip(streams, calls):
                with stream:
                    results.append(cuattn.attention_varlen(**call))
    cupy.cuda.Device().synchronize()
    for n, out in enumerate(results):
        assert_same_bits(out, alone[n % 2])


@pytest.mark.parametrize("counted", [True, False])
def test_graph_replay_with_other_lengths(counted, monkeypatch):
    """With a counter, which a graph keeps, and without one."""
    given = many_items(2000, 128, "pages")
    call, lengths = moved(GPU, given), cupy.asarray(np.int32([2000, 700]))
    places = [
        tuple(cupy.empty((2130, 16, *more), d) for more, d in (((128,), call["q"].dtype), ((), np.float32))) for _ in range(2)
    ]
    stream, engine = cupy.cuda.Stream(non_blocking=True), _launch.cupy_engine()

    def attend(out, lse):
        cuattn.attention_varlen(**call, seqused_k=lengths, out=out, lse=lse, return_state=True)

    with stream, cuattn.checking("arguments"), monkeypatch.context() as patch:
        attend(*places[0])
        if not counted:
            patch.setattr(engine, "counter", lambda device: None)
        stream.begin_capture()
        attend(*places[0])
        graph = stream.end_capture()
    for used in ([2000, 700], [1234, 0], [0, 699], [2000, 700]):
        lengths[...] = cupy.asarray(np.int32(used))
        for array in places[0]:
            array.view(cupy.uint8)[...] = 255              # NaN
        cupy.cuda.Device().synchronize()
        for _ in range(3):
            graph.launch(stream)
        with cuattn.checking("arguments"):
            attend(*places[1])                             # in another stream, beside the graph's last runs
        stream.synchronize()
        replayed = [array.get() for array in places[0]]
        for array, eager in zip(replayed, places[1]):
            assert_same_bits(array, eager)
        if used == [1234, 0]:
            expected = expected_of(given | {"seqused_k": np.int32(used)})
            limit, some = bounds(given, expected, "bfloat16"), np.r_[0:3, 766:769, 1998:2003, 2129]
            assert_state([x[some] for x in replayed], [x[some] for x in expected], [x[some] for x in limit], dtype="bfloat16")


def test_streams_that_come_and_go():
    """A handle may be used again while the work of a stream that had it goes on."""
    call = moved(GPU, many_items(2000, 128))
    alone, results = cuattn.attention_varlen(**call), []
    with cuattn.checking("arguments"):
        for _ in range(12):
            stream = cupy.cuda.Stream(non_blocking=True)
            stream.wait_event(cupy.cuda.get_current_stream().record())
            with stream:
                results.append(cuattn.attention_varlen(**call))
            del stream
    cupy.cuda.Device().synchronize()
    for out in results:
        assert_same_bits(out, alone)


def test_a_million_tokens():
    """The last queries of a prompt of 2^20 tokens, at once and in pages."""
    length, rows = 1 << 20, 200
    rng = cupy.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, h, 64), dtype=cupy.float32).astype(cupy.float16) for n, h in ((rows, 2), (length, 1), (length, 1)))
    ends_q, ends_k = (cupy.asarray(np.int32([0, n])) for n in (rows, length))
    state = cuattn.attention_varlen(q, k, v, ends_q, ends_k, causal=True, return_state=True)
    some = np.r_[0, 63, 64, 191, 192, 199]
    host = {n: x.get() for n, x in (("q", q[some]), ("k", k), ("v", v))}
    for n, i in enumerate(some):
        seen = length - rows + int(i) + 1
        given = {"q": host["q"][None, n : n + 1], **{x: host[x][None, :seen] for x in "kv"}}
        expected = expected_of(given)
        assert_state((state.out[i][None, None], state.lse[i][None, None]), expected, bounds(given, expected, "float16"), dtype="float16")
    table = cupy.random.permutation(length // 16).astype(np.int32)
    pages = [cupy.empty((length // 16, 16, 1, 64), np.float16) for _ in "kv"]
    for page, x in zip(pages, (k, v)):
        page[table] = x.reshape(page.shape)
    paged = cuattn.attention_varlen(q, *pages, ends_q, ends_k, block_table=table[None], causal=True, return_state=True)
    assert_same_bits(paged.out, state.out)
    assert_same_bits(paged.lse, state.lse)


if cupy.cuda.runtime.getDeviceCount() > 1:

    def on(device: int, arrays: dict) -> dict:
        with cupy.cuda.Device(device):
            return moved(GPU, arrays)

    @pytest.mark.parametrize("kind", ["dense", "packed", "pages"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_attention_on_another_device_than_the_current_one(kind, dtype):
        given = AttentionCase(((200, 300),), kind, (4, 2), dtype=dtype, control=1).arrays()
        expected, function = expected_of(given), cuattn.attention if kind == "dense" else cuattn.attention_varlen
        here, there = (function(**on(device, given), return_state=True) for device in (0, 1))
        assert there.out.device.id == there.lse.device.id == 1
        with cupy.cuda.Device(1):
            assert_state(there, expected, bounds(given, expected, dtype), dtype=dtype)
            assert_same_bits(there.out, here.out)

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_decode_and_append_on_another_device_than_the_current_one(dtype):
        given = DecodeCase((200, 3000), 1, (4, 2), (64, 64), 16, dtype).arrays()
        here, there = (decode(**on(device, given), return_state=True) for device in (0, 1))
        assert there.out.device.id == 1
        assert_same_bits(there.out, here.out)
        assert_same_bits(there.lse, here.lse)
        with cupy.cuda.Device(1):
            pages = [cupy.zeros((4, 16, 2, 64), dtype) for _ in "kv"]
            tokens = [cupy.ones((5, 2, 64), dtype) for _ in "kv"]
            slots = cupy.asarray(np.int64([0, 17, -1, 63, 40]))
        append_kv(*tokens, *pages, slots)
        assert [int(x.astype(np.float32).sum()) for x in pages] == [4 * 2 * 64] * 2
