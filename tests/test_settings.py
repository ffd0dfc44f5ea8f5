"""What the environment sets: how much is printed and how much is checked."""

from __future__ import annotations

import contextlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cuattn
from cuattn import _launch, _settings
from cuattn._compile import build, source_text
from cuattn._plan_state import plan_merge
from tests.engine import EmulatorEngine
from tests.planted import TINY, TINY_HEADER, TINY_KERNEL, plant

# What is printed


@pytest.mark.compile
def test_debug_prints_compilations_and_sources(monkeypatch, capsys, tmp_path):
    def told_at(level: str) -> str:
        monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / f"cache{level}"))
        monkeypatch.setenv("CUATTN_DEBUG", level)
        build(TINY_KERNEL, "sm_90")
        build(TINY_KERNEL, "sm_90")  # from the cache: nothing to tell
        return capsys.readouterr().err

    plant(monkeypatch, tmp_path, {"tiny.cu": TINY, "tiny.cuh": TINY_HEADER})
    assert [told_at(level) for level in ("", "0", "1")] == [""] * 3
    told = told_at("2")
    assert re.fullmatch(r"cuattn: tiny\.cu for sm_90 with VALUE=2: \d+\.\d\d s, .*'tiny': .*registers=\d+.*\n", told)
    told = told_at("3")
    assert f"cuattn: source of tiny.cu\n{source_text('tiny.cu')}\n" in told
    assert told.count("registers=") == 1


@pytest.mark.parametrize("level", ["1", "2", "3"])
def test_debug_prints_plans(monkeypatch, capsys, level):
    monkeypatch.setenv("CUATTN_DEBUG", level)
    merge_of_rows(5)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.match(r"cuattn: MergePlan\(.*entry='cuattn_merge_pair'.* grid=\(1, 1, 1\), block=\(\d+, 5, 1\)", lines[0])


class Nowhere(EmulatorEngine):
    """Runs nothing."""

    def launch(self, *_: object) -> None:
        pass


def merge_of_rows(rows: int) -> None:
    plan_merge.cache_clear()  # a plan is made, and told, once
    with _launch.emulated(Nowhere()):
        cuattn.merge_state(*(np.zeros(shape, np.float32) for shape in ((rows, 64), rows) * 2))


@pytest.mark.parametrize("level", ["x", "1.5", "verbose"])
def test_debug_refuses_other_levels(monkeypatch, level):
    monkeypatch.setenv("CUATTN_DEBUG", level)
    with pytest.raises(ValueError, match=rf"^CUATTN_DEBUG must be 0, 1, 2 or 3; got '{level}'$"):
        merge_of_rows(6)


# How much is checked


@pytest.fixture
def level(monkeypatch):
    """Sets CUATTN_CHECK, None: not at all, as if nothing had read it yet."""

    def set_level(value: str | None) -> None:
        monkeypatch.delenv("CUATTN_CHECK", raising=False)
        if value is not None:
            monkeypatch.setenv("CUATTN_CHECK", value)
        _settings._environment_level.cache_clear()

    yield set_level
    monkeypatch.undo()
    _settings._environment_level.cache_clear()


@pytest.fixture
def no_level(level):
    level(None)


def test_checking_nests_and_ends_with_an_exception(no_level):
    seen = [_settings.checks_values()]
    with cuattn.checking("values"):
        seen.append(_settings.checks_values())
        with contextlib.suppress(KeyError), cuattn.checking("arguments"):
            seen.append(_settings.checks_values())
            raise KeyError
        seen.append(_settings.checks_values())
    assert [*seen, _settings.checks_values()] == [False, True, False, True, False]


def test_checking_is_of_this_thread(no_level):
    barrier = threading.Barrier(2, timeout=10)

    def other() -> list[bool]:
        barrier.wait()  # within the block of the first thread
        seen = [_settings.checks_values()]
        with cuattn.checking("arguments"):
            barrier.wait()
            seen.append(_settings.checks_values())
        return seen

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(other)
        with cuattn.checking("values"):
            barrier.wait()
            barrier.wait()
            assert future.result() == [False, False]
            assert _settings.checks_values()


def test_environment_sets_the_level_outside_of_blocks(level):
    level("values")
    assert _settings.checks_values()
    with cuattn.checking("arguments"):
        assert not _settings.checks_values()
    level("valeus")
    with pytest.raises(ValueError, match=r"^CUATTN_CHECK must be one of arguments, values; got 'valeus'$"):
        _settings.checks_values()


@pytest.mark.parametrize("engine", [None, Nowhere()], ids=["NumPy arrays", "device arrays"])
def test_a_wrong_level_is_refused_wherever_arrays_are(level, engine):
    level("valeus")
    outs, lses, out = np.ones((3, 4), np.float32), np.zeros(3, np.float32), np.zeros((1, 4), np.float32)
    place = contextlib.nullcontext() if engine is None else _launch.emulated(engine)
    with place, pytest.raises(ValueError, match=r"^CUATTN_CHECK must be one of arguments, values; got 'valeus'$"):
        cuattn.merge_states_varlen(outs, lses, np.array([0, 3]), out=out)
    assert not out.any()


@pytest.mark.parametrize("level", ["", "Values", None, 2])
def test_checking_refuses_other_levels(level):
    message = r"^checking: level must be one of arguments, values; got "
    with pytest.raises(ValueError, match=message), cuattn.checking(level):
        pytest.fail("the block was entered")
