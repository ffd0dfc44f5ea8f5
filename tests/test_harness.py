"""The benches' harness without a GPU: its command line, and whole runs on a scripted clock."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import gpu, harness
from tests.bench_fakes import CASES, FakeDevice


def test_filters():
    filters = harness.parse_filters(["rows=4096", "rows=1", "op=merge"])
    assert filters == {"rows": {"4096", "1"}, "op": {"merge"}}
    assert harness.select(CASES, filters) == CASES[:1]
    assert harness.select(CASES, {}) == CASES
    assert harness.select(CASES, {"page": {"16"}}) == []
    with pytest.raises(ValueError, match="key=value; got 'rows'"):
        harness.parse_filters(["rows"])


def exit_code(*argv, **options):
    def setup(case, seed):
        raise AssertionError("needs a GPU")

    with pytest.raises(SystemExit) as stop:
        harness.main("state", CASES, setup, argv=argv, **options)
    return stop.value.code


def test_list_needs_no_gpu(capsys):
    assert exit_code("--list", bytes_moved=lambda case: case["rows"] * 100) == 0
    shared, head, *body = capsys.readouterr().out.splitlines()
    assert shared == "all rows: op=merge  dtype=bfloat16"
    assert head.split() == ["rows", "states", "|", "bytes"]
    assert [line.split()[-1] for line in body] == ["409600", "6553600"]


def test_without_a_gpu_it_exits_with_one_line(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "missing_gpu", lambda: "CuPy finds no CUDA GPU")
    assert exit_code() == 2
    assert capsys.readouterr().err == "bench_state: CuPy finds no CUDA GPU; only --list needs no GPU\n"


ROOT = Path(__file__).parent.parent
WITHOUT_CUPY = """
import runpy, sys
sys.modules["cupy"] = None  # cannot be imported
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


BENCHES = {path.stem for path in (ROOT / "bench").glob("bench_*.py")} - {"bench_llm"}  # which runs on NumPy too


@pytest.mark.parametrize("bench", sorted(BENCHES))
def test_without_cupy_a_bench_lists_its_cases_or_says_what_to_install(bench):
    def run(*argv):
        command = [sys.executable, "-c", WITHOUT_CUPY, f"bench.{bench}", *argv]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    done = run()
    install = "CuPy is not installed (pip install 'cuattn[cuda13x]' brings it); only --list needs no GPU"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{bench}: {install}\n")
    done = run("--list")
    assert (done.returncode, done.stderr) == (0, "") and "bytes" in done.stdout


@pytest.mark.parametrize(
    "argv", [["--filter", "rows=7"], ["--filter", "rows"], ["--compare", "nowhere.jsonl"]]
)
def test_bad_arguments(argv):
    assert exit_code(*argv) == 2


def bench_run(monkeypatch, argv, err=0.3, peer_raises=None):
    """The whole of a run on the fake device: ours 10 µs, one peer 20 µs and eager, one that is not there."""
    monkeypatch.setitem(sys.modules, "cuattn", SimpleNamespace(__version__="0.1"))
    device = FakeDevice()

    def setup(case, seed):
        call = device.call("ours", 10.0)
        return harness.Run(call, check=lambda: err, eager=device.call("eager", 7.0))

    def setup_peer(case, seed):
        if peer_raises and case == CASES[1]:
            raise peer_raises
        return harness.Run(device.call("peer", 20.0, capturable=False))

    peers = {"slow": setup_peer, "absent": lambda case, seed: None}
    bench = harness.Bench("state", setup, bytes_moved=lambda case: 10**7, peers=peers)
    return harness.run(device, bench, CASES, harness.parser("state", "cold").parse_args(["--quick", *argv]))


def test_a_whole_run(monkeypatch, tmp_path, capsys):
    results, readme = tmp_path / "runs.jsonl", tmp_path / "README.md"
    readme.write_text("<!-- bench:start state -->\n<!-- bench:end state -->\n")
    argv = ["--json", str(results), "--readme", str(readme)]
    assert bench_run(monkeypatch, argv, peer_raises=ValueError("rows too many\nlong trace")) == 0
    out = capsys.readouterr().out
    first, second = json.loads(results.read_text())["rows"]
    assert first["gpu_us"]["median"] == pytest.approx(10.0)
    assert first["host_us"] == pytest.approx(7.0)
    assert first["gb_per_s"] == pytest.approx(1000.0)
    assert first["copy_percent"] == pytest.approx(1000.0 / (2 * 2**30 / 500e-6 / 1e9) * 100)
    assert first["l2"] == "cold x11"
    assert list(first["peers"]) == ["slow"]
    assert first["peers"]["slow"]["ratio"]["median"] == pytest.approx(0.5)
    assert second["peers"]["slow"] == {"error": "ValueError: rows too many\nlong trace"}
    assert "absent" not in out
    assert "20.0*" in out
    assert "    slow: RuntimeError: not in a graph\n" in out
    assert "    slow: ValueError: rows too many\n" in out
    assert "| 4096 | 8 | cold x11 | 10.0 |" in readme.read_text()
    assert bench_run(monkeypatch, ["--compare", str(results)]) == 0
    assert capsys.readouterr().out.count("     1.00\n") == 2


@pytest.mark.parametrize("err", [1.01, math.nan, math.inf])
def test_a_wrong_result_is_shown_and_ends_in_1(monkeypatch, capsys, tmp_path, err):
    path = tmp_path / "runs.jsonl"
    assert bench_run(monkeypatch, ["--json", str(path)], err=err) == 1
    assert capsys.readouterr().out.count("WRONG") == 2
    assert all(row["wrong"] for row in json.loads(path.read_text())["rows"])


def test_the_first_copy_is_checked_after_its_own_call():
    called = []

    def setup(case, seed):
        return harness.Run(lambda: called.append(seed), check=lambda: float(called[-1] == seed == 0))

    runs, err = harness.start(setup, CASES[0], 3)
    assert (len(runs), err, called) == (3, 1.0, [2, 1, 0])
