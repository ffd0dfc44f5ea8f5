"""The benches' harness without a GPU: choices, texts and files, and the timing logic on a scripted clock."""

import json
import math
import sys
from types import SimpleNamespace

import pytest

from bench import gpu, harness, report, timing

L2_BYTES = 50_000_000
CASES = [
    {"op": "merge", "rows": 4096, "states": 8, "dtype": "bfloat16"},
    {"op": "merge", "rows": 65536, "states": 2, "dtype": "bfloat16"},
]


class FakeDevice:
    """A GPU whose calls do nothing but move its clock; `log` tells what ran, in order."""

    l2_bytes = L2_BYTES

    def __init__(self):
        self.seconds = 0.0
        self.log = []
        self.capturing = False
        self.replaying = False
        self.graph_sizes = []

    def call(self, name, us, launch_us=0.0, capturable=True):
        """A call of `us` on the GPU (number or function of the time); outside graphs at least `launch_us`."""

        def launch():
            if self.capturing:
                if not capturable:
                    raise timing.CaptureError("RuntimeError: not in a graph")
                return
            self.log.append(name)
            gpu_us = us(self.seconds) if callable(us) else us
            self.seconds += max(gpu_us, 0.0 if self.replaying else launch_us) * 1e-6

        return launch

    def capture(self, calls):
        self.capturing = True
        try:
            for call in calls:
                call()
        finally:
            self.capturing = False
        self.graph_sizes.append(len(calls))

        def replay():
            self.replaying = True
            for call in calls:
                call()
            self.replaying = False

        return replay

    def time_us(self, launches, before=None):
        times = []
        for launch in launches:
            if before is not None:
                before()
            start = self.seconds
            launch()
            times.append((self.seconds - start) * 1e6)
        return times

    def flush(self):
        self.log.append("flush")
        self.seconds += 40e-6

    def synchronize(self):
        self.log.append("sync")

    def now(self):
        return self.seconds

    def copy_call(self, num_bytes):
        return self.call("copy", 500)

    def matmul_call(self, n):
        return self.call("matmul", 1400)

    def describe(self):
        return {"gpu": "Fake", "sms": 132, "driver": "13.0", "runtime": "13.2", "cupy": "14.2.0"}

    def release(self):
        pass


def row(case, median=41.2, **changes):
    gpu = {"median": median, "p10": median - 1, "p90": median + 1}
    ours = {
        "gpu_us": gpu,
        "mode": "graph",
        "note": "",
        "host_us": 9.14,
        "err_over_bound": 0.31,
        "wrong": False,
    }
    rates = {"gb_per_s": 3257.0, "copy_percent": 76.2}
    return {"case": case, "l2": "warm", **ours, "peers": {}, **rates, **changes}


def titles(groups):
    return [title for group in groups for title, _, _ in group]


# Statistics and choices.


def test_stats_are_median_and_tenth_and_ninetieth_percentile():
    stats = timing.Stats.of(range(101))
    assert (stats.median, stats.p10, stats.p90) == (50, 10, 90)
    assert timing.Stats.of([3.0]) == timing.Stats(3.0, 3.0, 3.0)


@pytest.mark.parametrize("call_us", [0.0, 0.5, 2.3, 14.1, 133.6, 400.0, 999.0])
@pytest.mark.parametrize("copies", [1, 3, 64])
def test_a_launch_lasts_long_enough_in_whole_rotations(call_us, copies):
    calls = timing.calls_per_launch(call_us, copies)
    assert calls % copies == 0
    assert calls * max(call_us, timing.EVENT_US) >= timing.REPLAY_US
    assert calls == copies or (calls - copies) * max(call_us, timing.EVENT_US) < timing.REPLAY_US


@pytest.mark.parametrize(
    "footprint", [L2_BYTES // 31, L2_BYTES // 2, L2_BYTES, 2 * L2_BYTES, 2 * L2_BYTES + 1]
)
def test_cold_copies_exceed_twice_l2_and_one_fewer_would_not(footprint):
    plan = timing.plan_l2("cold", footprint, L2_BYTES)
    assert plan.copies * footprint > 2 * L2_BYTES >= (plan.copies - 1) * footprint
    assert plan.label == ("cold" if plan.copies == 1 else f"cold x{plan.copies}")
    assert not plan.flush


@pytest.mark.parametrize("footprint", [None, 0, 1, 2 * L2_BYTES // timing.MAX_COPIES])
def test_cold_flushes_when_copies_would_be_too_many_or_the_size_is_unknown(footprint):
    assert timing.plan_l2("cold", footprint, L2_BYTES) == timing.L2Plan("cold flush", flush=True)


@pytest.mark.parametrize(
    ("footprint", "label"),
    [
        (None, "warm"),
        (L2_BYTES, "warm"),
        (L2_BYTES + 1, "mixed"),
        (2 * L2_BYTES, "mixed"),
        (2 * L2_BYTES + 1, "cold"),
    ],
)
def test_warm_is_called_warm_only_when_the_inputs_fit(footprint, label):
    assert timing.plan_l2("warm", footprint, L2_BYTES) == timing.L2Plan(label)


def test_version_text():
    assert gpu.version_text(13020) == "13.2"


# Timing on a scripted clock.


def test_short_calls_go_into_a_graph_whose_length_ignores_launch_cost():
    device = FakeDevice()
    timed = timing.prepare(device, [device.call("k", 2.0, launch_us=12.0)], timing.L2Plan("warm"))
    assert (timed.mode, timed.calls) == ("graph", 200)
    times = timing.sample(device, timed, 0.01, timing.L2Plan("warm"))
    assert times == pytest.approx([2.0] * len(times))


def test_a_graph_visits_all_copies():
    device = FakeDevice()
    plan = timing.L2Plan("cold x3", copies=3)
    timed = timing.prepare(device, [device.call(name, 10.0) for name in "abc"], plan)
    assert timed.calls == 42
    device.log.clear()
    next(timed.launches)()
    assert device.log == list("abc") * 14


def test_long_calls_have_a_pair_of_events_each_and_rotate_across_bursts():
    device = FakeDevice()
    plan = timing.L2Plan("cold x3", copies=3)
    timed = timing.prepare(device, [device.call(name, 6000.0) for name in "abc"], plan)
    assert (timed.mode, timed.calls, device.graph_sizes) == ("single", 1, [])
    device.log.clear()
    times = timing.sample(device, timed, 0.03, plan)
    assert times == pytest.approx([6000.0] * len(times))
    assert device.log == (list("abc") * 5)[: len(times)]
    assert len(times) > 4


def test_calls_that_cannot_be_captured_are_timed_eagerly_with_the_reason():
    device = FakeDevice()
    calls = [device.call(name, 20.0, launch_us=60.0, capturable=False) for name in "ab"]
    timed = timing.prepare(device, calls, timing.L2Plan("cold x2", copies=2))
    assert (timed.mode, timed.calls, timed.note) == ("eager", 8, "RuntimeError: not in a graph")
    device.log.clear()
    next(timed.launches)()
    assert device.log == list("ab") * 4


@pytest.mark.parametrize("capturable", [True, False])
def test_flush_runs_before_every_call_and_is_not_timed(capturable):
    device = FakeDevice()
    plan = timing.L2Plan("cold flush", flush=True)
    timed = timing.prepare(device, [device.call("k", 5.0, capturable=capturable)], plan)
    assert timed.calls == 1
    device.log.clear()
    times = timing.sample(device, timed, 0.0, plan)
    assert times == pytest.approx([5.0] * timing.MAX_BURST)
    assert device.log == ["flush", "k"] * (timing.MAX_BURST + 1)  # one more: the first of a burst is dropped


def test_contestants_take_turns_in_every_round():
    device = FakeDevice()
    plan = timing.L2Plan("warm")
    timed = {name: timing.prepare(device, [device.call(name, 2000.0)], plan) for name in ("ours", "peer")}
    device.log.clear()
    rounds = timing.alternate(device, timed, plan, timing.Durations(0.0, 0.0, 0.0, rounds=4))
    turns = [name for i, name in enumerate(device.log) if i == 0 or device.log[i - 1] != name]
    assert turns == ["ours", "peer"] * 5  # the warm-up and four rounds
    assert all(len(times) == 4 and all(times) for times in rounds.values())


def test_the_ratio_survives_a_clock_that_drifts():
    device = FakeDevice()
    plan = timing.L2Plan("warm")

    def slower(us):
        return lambda seconds: us * (1 + seconds)

    timed = {
        n: timing.prepare(device, [device.call(n, slower(us))], plan) for n, us in (("a", 8.0), ("b", 10.0))
    }
    rounds = timing.alternate(device, timed, plan, timing.FULL)
    ratio = timing.ratio(rounds["a"], rounds["b"])
    assert timing.flat(rounds["a"]).p90 > 1.3 * timing.flat(rounds["a"]).p10
    assert ratio["min"] <= ratio["median"] <= ratio["max"]
    assert ratio["median"] == pytest.approx(0.8, rel=0.06)


def test_ratio_and_its_range_over_rounds():
    assert timing.ratio([[1.0, 1.0], [3.0]], [[2.0], [2.0]]) == {"median": 0.5, "min": 0.5, "max": 1.5}


def test_host_time_excludes_waiting_and_bounds_the_queue():
    device = FakeDevice()
    device.synchronize = lambda: (device.log.append("sync"), device.call("wait", 9e5)())
    assert timing.host_us(device, device.call("e", 30.0), 100.0, 0.0) == pytest.approx(30.0)
    assert device.log.count("e") == 1 + timing.HOST_BATCH
    device.log.clear()
    timing.host_us(device, device.call("e", 30.0), 2e5, 0.0)
    assert device.log.count("e") == 2


def test_ceilings():
    device = FakeDevice()
    assert timing.ceilings(device, True, timing.QUICK) == {
        "copy_gb_per_s": pytest.approx(2 * 2**30 / 500e-6 / 1e9),
        "matmul_tflop_per_s": pytest.approx(2 * 8192**3 / 1400e-6 / 1e12),
    }
    assert timing.ceilings(device, False, timing.QUICK)["matmul_tflop_per_s"] is None


@pytest.mark.parametrize("fails_at", ["call", "end", "call and end"])
def test_a_failed_capture_is_ended_and_reported(fails_at):
    log = []

    def end_capture():
        log.append("end")
        if "end" in fails_at:
            raise OSError("capture invalidated")

    def call():
        log.append("call")
        if "call" in fails_at:
            raise RuntimeError("not permitted")

    device = object.__new__(gpu.GpuDevice)  # its constructor needs a GPU
    device._stream = SimpleNamespace(begin_capture=lambda: log.append("begin"), end_capture=end_capture)
    device._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(CUDARuntimeError=OSError)))
    first = "RuntimeError: not permitted" if "call" in fails_at else "OSError: capture invalidated"
    with pytest.raises(timing.CaptureError, match=first):
        device.capture([call])
    assert log == ["begin", "call", "end"]


# Texts.


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.314, "0.31"), (2.3, "2.30"), (41.23, "41.2"), (503.42, "503.4"), (27751.4, "27751")],
)
def test_number(value, text):
    assert report.number(value) == text


def test_lines_are_aligned():
    peer = row(CASES[0]) | {"ratio": {"median": 0.873, "min": 0.85, "max": 0.89}}
    rows = [
        row(CASES[0], peers={"flashinfer": peer}),
        row(CASES[1], 27751.0, host_us=None, mode="eager", peers={"flashinfer": {"error": "ValueError: no"}}),
        row(CASES[1], l2="cold x12", wrong=True, err_over_bound=3.2),
    ]
    groups = [report.cells(r, CASES, ["flashinfer"], {}) for r in rows]
    lines = [report.line(groups[0], titles=True), *map(report.line, groups)]
    assert len({len(text) for text in lines}) == 1
    assert [[i for i, c in enumerate(text) if c == "|"] for text in lines] == [
        [i for i, c in enumerate(lines[0]) if c == "|"]
    ] * 4
    assert all(titles(g) == titles(groups[0]) for g in groups)
    assert "0.87 (0.85-0.89)" in lines[1]
    assert "27751*" in lines[2]
    assert "failed" in lines[2]
    assert "WRONG 3.2" in lines[3]


def test_fields_shared_by_all_cases_are_no_columns():
    assert report.constants(CASES) == {"op": "merge", "dtype": "bfloat16"}
    assert [title for title, _, _ in report.case_cells(CASES[0], CASES)] == ["rows", "states"]
    assert [title for title, _, _ in report.case_cells(CASES[0], CASES[:1])] == list(CASES[0])
    assert report.case_cells(CASES[0], [CASES[0], {"page": 16}])[-1] == ("page", "-", 2)


def test_markdown():
    text = report.markdown([row(case) for case in CASES])
    shared, empty, head, rule, *body = text.splitlines()
    assert (shared, empty) == ("op merge, dtype bfloat16", "")
    assert head.startswith("| rows | states | L2 | gpu µs |")
    assert set(rule) == set("|-: ")
    assert body[0] == "| 4096 | 8 | warm | 41.2 | (40.2-42.2) | 9.14 | 3257 | 76.2 | 0.31 |"
    assert {line.count("|") for line in (head, rule, *body)} == {10}


# Files.


def test_readme_table_is_replaced_between_its_own_markers_only(tmp_path):
    readme = tmp_path / "README.md"
    other = "<!-- bench:start states -->\nkept\n<!-- bench:end states -->\n"
    readme.write_text(
        f"# µ\n{other}<!-- bench:start state -->\nold\n<!-- bench:end state -->\ntail\n", "utf-8"
    )
    report.update_readme(readme, "state", "new\n")
    once = readme.read_text("utf-8")
    report.update_readme(readme, "state", "new\n")
    assert readme.read_text("utf-8") == once
    assert once == f"# µ\n{other}<!-- bench:start state -->\nnew\n<!-- bench:end state -->\ntail\n"
    with pytest.raises(ValueError, match=r"README\.md must contain <!-- bench:start decode -->"):
        report.update_readme(readme, "decode", "new")


def test_json_round_trip_and_newest_entry_wins(tmp_path):
    path = tmp_path / "runs.jsonl"
    header = {"bench": "state", "gpu": "Fake"}
    case = CASES[0] | {"heads": (32, 8)}
    report.append_json(path, header, [row(case, 40.0), row(CASES[1], 80.0)])
    report.append_json(path, header, [row(case, 50.0)])
    report.append_json(path, header | {"gpu": "Other"}, [row(case, 1.0)])
    report.append_json(path, header | {"bench": "decode"}, [row(case, 2.0)])
    assert [json.loads(line)["header"]["bench"] for line in path.read_text().splitlines()] == [
        "state"
    ] * 3 + ["decode"]
    baseline = report.load_baseline(path, header)
    assert baseline == {report.row_key(row(case)): 50.0, report.row_key(row(CASES[1])): 80.0}
    assert report.row_key(row(case)) == report.row_key(row(case | {"heads": [32, 8]}))
    assert report.row_key(row(case)) != report.row_key(row(case, l2="cold"))
    cells = report.cells(row(case, 60.0), [case], [], baseline)
    assert cells[-1] == [("now/then", "1.20", 8)]


def test_revision_of_sources_outside_git_depends_on_kernels(tmp_path):
    (tmp_path / "kernels_cu").mkdir()
    kernel = tmp_path / "kernels_cu" / "state.cu"
    kernel.write_text("a")
    first = report.revision(tmp_path)
    assert first == report.revision(tmp_path)
    assert first.startswith("digest ")
    kernel.write_text("b")
    assert report.revision(tmp_path) != first


# Command line.


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
    assert capsys.readouterr().err == "bench_state: CuPy finds no CUDA GPU; only --list works without one\n"


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
