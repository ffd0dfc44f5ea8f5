"""The engine of device arrays without a device: which arrays it takes, and how it loads and launches."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import _launch
from cuattn._call import Call
from cuattn._compile import Binary, Resources
from cuattn._launch import CupyEngine, DeviceInfo
from tests.device_fakes import Recorder, on_device
from tests.planted import TINY_KERNEL

F32 = np.float32


class Foreign:
    """An array of another library, which says by DLPack where it is."""

    def __init__(self, device_type: int, error: Exception | None = None) -> None:
        self.device_type, self.error = device_type, error

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, **_: object) -> None:
        raise self.error or AssertionError("not to be asked for")


class Interface:
    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (256, False), "version": 3}  # noqa: RUF012


# Recognition


def test_cupy_arrays_are_device_arrays():
    a, b = on_device((3, 4), np.float16), on_device((3,), ml_dtypes.bfloat16)
    call = Call("f", {"a": a, "absent": None, "b": b})
    assert isinstance(call.engine, CupyEngine)
    assert call.engine is Call("f", {"a": a}).engine  # one for all calls
    assert call.device == 0
    assert call.arrays["a"] is a
    assert call.arrays["b"] is b
    assert call.arrays["absent"] is None
    assert Call("f", {"a": on_device((3,), device=5)}).device == 5


@pytest.mark.parametrize("index", [np.s_[:], np.s_[1:], np.s_[:, ::-1], np.s_[::2, 1:], np.s_[:, 2:3], np.s_[0:0]])
def test_specs_are_those_of_numpy(index):
    array = on_device((4, 16), np.float16)
    host = np.zeros((4, 16), np.float16)
    (spec,) = Call("f", {"a": array[index]}).required("a")
    assert (spec.shape, spec.strides, spec.dtype) == (host[index].shape, host[index].strides, host.dtype)
    address = array.data.ptr + host[index].ctypes.data - host.ctypes.data
    assert spec.alignment == min(16, address & -address)


def test_no_emulator_outlives_its_test():
    assert _launch._emulator is None


def test_host_and_device_do_not_mix():
    message = r"^f: arrays must be all on the host or all on one device; got a on the host and b on device 0$"
    with pytest.raises(TypeError, match=message):
        Call("f", {"a": np.zeros(3), "n": None, "b": on_device((3,)), "c": np.zeros(3)})
    with pytest.raises(TypeError, match=r"got b on device 1 and c on the host$"):
        Call("f", {"b": on_device((3,), device=1), "c": np.zeros(3)})


def test_devices_do_not_mix():
    with pytest.raises(ValueError, match=r"^f: c must be on the device of a \(0\); got device 1$"):
        Call("f", {"a": on_device((3,)), "b": on_device((3,)), "c": on_device((3,), device=1)})


@pytest.mark.parametrize(
    "array", [[1.0, 2.0], (1.0,), 1.0, "text", np.float32(1), object()], ids=lambda a: type(a).__name__
)
def test_what_is_no_array_is_refused(array):
    kind = f"{type(array).__module__}.{type(array).__name__}".removeprefix("builtins.")
    message = rf"^f: a must be a NumPy array or an array on a CUDA device; got {kind}$"
    with pytest.raises(TypeError, match=message):
        Call("f", {"a": array})


def test_required_arrays_may_not_be_none():
    with pytest.raises(TypeError, match=r"^f: b must be an array; got None$"):
        Call("f", {"a": np.zeros(3), "b": None}).required("a", "b")


# Arrays of other libraries


@pytest.mark.parametrize("device_type", [1, 3])  # host memory, pinned or not
def test_foreign_arrays_on_the_host_are_refused(device_type):
    message = r"a must be .* got tests\.test_engine\.Foreign on the host \(numpy\.asarray makes it a NumPy array\)$"
    with pytest.raises(TypeError, match=message):
        Call("f", {"a": Foreign(device_type)})


@pytest.mark.parametrize("error", [BufferError("read-only"), TypeError("float8"), RuntimeError("no driver")], ids=repr)
def test_foreign_arrays_that_dlpack_refuses(monkeypatch, error):
    monkeypatch.setattr(CupyEngine, "from_dlpack", lambda _, array: array.__dlpack__())
    with pytest.raises(TypeError, match=rf"f: a must be .* got tests\.test_engine\.Foreign \({error}\)$"):
        Call("f", {"a": Foreign(2, error)})


WAYS = [(Foreign(2), "from_dlpack"), (Foreign(13), "from_dlpack"), (Interface(), "from_cuda_array_interface")]


@pytest.mark.parametrize(("array", "way"), WAYS, ids=["CUDA memory", "managed memory", "no DLPack"])
def test_foreign_arrays_are_taken_as_cupy_arrays(monkeypatch, array, way):
    taken = on_device((3,))
    monkeypatch.setattr(CupyEngine, way, lambda _, given: taken if given is array else None)
    call = Call("f", {"a": array})
    assert call.arrays["a"] is taken
    assert call.device == 0


def test_foreign_arrays_keep_to_their_place(monkeypatch):
    monkeypatch.setattr(CupyEngine, "from_dlpack", lambda *_: on_device((3,), device=1))
    with pytest.raises(ValueError, match=r"b must be on the device of a \(0\); got device 1"):
        Call("f", {"a": on_device((3,)), "b": Foreign(2)})
    with pytest.raises(TypeError, match="got a on the host and b on device 1"):
        Call("f", {"a": np.zeros(3), "b": Foreign(2)})


# A whole call


def test_merge_passes_the_very_arrays_to_the_kernel(monkeypatch):
    launched = []
    monkeypatch.setattr(CupyEngine, "info", lambda self, device: DeviceInfo((9, 0), 132))
    monkeypatch.setattr(CupyEngine, "launch", lambda self, *args: launched.append(args))
    outs, lses = ([on_device(shape, device=2) for _ in range(3)] for shape in ((5, 2, 64), (5, 2)))
    state = cuattn.merge_state(outs[0], lses[0], outs[1], lses[1], out=outs[2], lse=lses[2])
    assert state.out is outs[2]
    assert state.lse is lses[2]
    ((kernel, grid, block, shared, args, device),) = launched
    assert kernel.entry == "cuattn_merge_pair"
    assert device == 2
    assert shared == 0
    assert grid[0] * block[1] >= 10
    expected = [outs[0], lses[0], outs[1], lses[1], None, outs[2], lses[2]]
    assert all(given is wanted for given, wanted in zip(args, expected))
    assert isinstance(args[7], np.void)


def test_merge_of_host_and_device_names_both():
    host, device = (np.zeros((5, 8), F32), np.zeros(5, F32)), (on_device((5, 8)), on_device((5,)))
    with pytest.raises(TypeError, match=r"merge_state: .* got out_a on the host and out_b on device 0"):
        cuattn.merge_state(*host, *device)
    with pytest.raises(TypeError, match=r"merge_state: .* got out_a on device 0 and out on the host"):
        cuattn.merge_state(*device, *device, out=np.zeros((5, 8), F32))


# Loading and launching, by a CuPy that records


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(_launch, "_driver", lambda: recorder)
    monkeypatch.setattr(_launch, "supported_architectures", lambda: (75, 80, 90))
    return recorder


@pytest.fixture
def builds(monkeypatch) -> list[str]:
    seen: list[str] = []

    def fake(kernel, arch):
        time.sleep(0.02)  # long enough for other threads to come by
        seen.append(arch)
        return Binary(b"code", {kernel.entry: Resources(30, 0, 0, 0, 1024)})

    monkeypatch.setattr(_launch, "build", fake)
    return seen


@pytest.fixture
def engine(recorder) -> CupyEngine:
    engine = CupyEngine()
    engine._cupy = recorder
    engine._nvtx = SimpleNamespace(RangePush=recorder.ranges.append, RangePop=lambda: recorder.ranges.append("end"))
    return engine


def launch(engine: CupyEngine, *args: object, device: int = 1) -> None:
    engine.launch(TINY_KERNEL, (3, 1, 1), (32, 1, 1), 5000, args, device)


def test_launch_is_on_the_device_of_the_arrays(engine, recorder, builds):
    for device in (1, 1, 0):
        launch(engine, np.int32(7), device=device)
    assert builds == ["sm_90", "sm_90"]  # once for each device, and on disk once for both
    assert recorder.loaded == [(1, b"code"), (0, b"code")]
    assert recorder.launched == [(d, "tiny", (3, 1, 1), (32, 1, 1), (np.int32(7),), 5000) for d in (1, 1, 0)]
    assert recorder.limits == [(101, (227 << 10) - 1024), (102, (227 << 10) - 1024)]  # all but the static ones
    assert recorder.ranges == ["tiny", "end"] * 3
    assert recorder.current == 0


def test_bare_numbers_are_refused_before_anything_else(engine, recorder, builds):
    with pytest.raises(TypeError, match="tiny: argument 1 is a bare int"):
        launch(engine, np.int32(7), 7)
    assert recorder.launched == recorder.loaded == builds == recorder.ranges == []


def test_failed_launch_ends_its_range_and_leaves_its_device(engine, recorder, builds):
    with pytest.raises(RuntimeError, match="too many resources"):
        launch(engine, "too many resources")
    assert recorder.ranges == ["tiny", "end"]
    assert recorder.current == 0


def test_threads_load_a_kernel_once(engine, recorder, builds):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: launch(engine, np.int32(7), device=0), range(8)))
    assert builds == ["sm_90"]
    assert len(recorder.launched) == 8


def test_info_is_asked_for_once(engine, recorder):
    assert (engine.info(0), engine.info(2)) == (DeviceInfo((9, 0), 132), DeviceInfo((12, 0), 132))
    recorder.cuda = None
    assert (engine.info(0), engine.info(2)) == (DeviceInfo((9, 0), 132), DeviceInfo((12, 0), 132))
