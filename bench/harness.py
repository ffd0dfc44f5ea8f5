"""The command line of every bench: cases in, rows out. `bench.timing` measures, `bench.report` prints and keeps.

A bench is cases and formulas::

    # bench/bench_state.py
    CASES = [dict(op="merge_states", rows=4096, states=8, heads=32, head_dim=128, dtype="bfloat16")]

    def bytes_moved(case): ...          # what one call must read and write, padding not counted

    def setup(case, seed):              # inputs on the GPU; another seed gives a rotated copy of the inputs
        parts, part_lse, out, lse = ...
        return harness.Run(
            call=lambda: cuattn.merge_states(parts, part_lse, out=out, lse=lse),     # allocates nothing
            check=lambda: worst_error_over_bound(out, reference.merge_states(...)),  # of what `call` did
            eager=lambda: cuattn.merge_states(parts, part_lse),                      # as a user calls it
        )

    PEERS = {"flashinfer": setup_flashinfer}    # like `setup`; returns None when the peer cannot be imported

    if __name__ == "__main__":
        harness.main("state", CASES, setup, bytes_moved=bytes_moved, peers=PEERS)

`python -m bench.bench_state --list` needs no GPU. A peer that allocates its outputs inside `call` is captured
all the same once it is warm; one that cannot be captured is timed eagerly and marked with a star.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from bench import gpu, timing
from bench.report import (
    Case,
    Row,
    append_json,
    case_cells,
    cells,
    header_text,
    line,
    load_baseline,
    markdown,
    revision,
    shared_text,
    update_readme,
)


@dataclass(frozen=True)
class Run:
    """One set of inputs: what to time, and how to judge it."""

    call: Callable[[], object]  # launches on the current stream
    check: Callable[[], float] | None = None  # error / bound of what `call` has just computed
    eager: Callable[[], object] | None = None  # the public call, for its cost on the host


Setup = Callable[[Case, int], Run | None]


@dataclass(frozen=True)
class Bench:
    name: str
    setup: Setup
    bytes_moved: Callable[[Case], int] | None = None
    flops: Callable[[Case], int] | None = None
    peers: dict[str, Setup] = field(default_factory=dict)


def start(setup: Setup, case: Case, copies: int) -> tuple[list[Run], float | None] | None:
    """Build the copies, call each once (compiles, warms allocators), check one; None if not importable."""
    runs = []
    for seed in range(copies):
        run = setup(case, seed)
        if run is None:
            return None
        runs.append(run)
    for run in reversed(runs):  # the first copy last: it is checked, and outputs may be shared
        run.call()
    return runs, None if runs[0].check is None else float(runs[0].check())


def measure(device: timing.Device, bench: Bench, case: Case, l2: str, durations: timing.Durations) -> Row:
    """One row: everything is built and checked first, then captured, then timed in turns."""
    num_bytes = bench.bytes_moved(case) if bench.bytes_moved else None
    plan = timing.plan_l2(l2, num_bytes, device.l2_bytes)
    contestants = {"cuattn": start(bench.setup, case, plan.copies)}
    peers: dict[str, Row] = {}
    for name, setup in bench.peers.items():
        try:
            contestants[name] = start(setup, case, plan.copies)
        except Exception as refusal:  # a peer that refuses a case must not end the bench
            peers[name] = {"error": f"{type(refusal).__name__}: {refusal}"}
    ready = {name: started for name, started in contestants.items() if started is not None}
    timed = {name: timing.prepare(device, [r.call for r in runs], plan) for name, (runs, _) in ready.items()}
    rounds = timing.alternate(device, timed, plan, durations)
    entries: dict[str, Row] = {}
    for name, (runs, error) in ready.items():
        gpu = timing.flat(rounds[name])
        eager = runs[0].eager
        entries[name] = {
            "gpu_us": asdict(gpu),
            "mode": timed[name].mode,
            "note": timed[name].note,
            "host_us": eager and timing.host_us(device, eager, gpu.median, durations.host_s),
            "err_over_bound": error if error is not None and math.isfinite(error) else None,
            "wrong": error is not None and not error <= 1,  # so NaN is wrong
        }
    ours = entries.pop("cuattn")
    for name, entry in entries.items():
        peers[name] = entry | {"ratio": timing.ratio(rounds["cuattn"], rounds[name])}
    row: Row = {"case": case, "l2": plan.label, **ours, "peers": peers}
    if num_bytes is not None:
        row["gb_per_s"] = num_bytes / ours["gpu_us"]["median"] * 1e-3
    if bench.flops:
        row["tflop_per_s"] = bench.flops(case) / ours["gpu_us"]["median"] * 1e-6
    return row


def add_percentages(row: Row, ceilings: Row) -> None:
    """Rates as percent of what the card gave in this process; None where that was not measured."""
    for rate, ceiling, percent in (
        ("gb_per_s", "copy_gb_per_s", "copy_percent"),
        ("tflop_per_s", "matmul_tflop_per_s", "matmul_percent"),
    ):
        if rate in row:
            row[percent] = row[rate] / ceilings[ceiling] * 100 if ceilings[ceiling] else None


def listing(bench: Bench, cases: Sequence[Case]) -> str:
    """The cases with their bytes and operations; needs no GPU."""
    formulas = {"bytes": bench.bytes_moved, "flops": bench.flops}
    table = [
        [case_cells(case, cases), [(title, str(f(case)), 16) for title, f in formulas.items() if f]]
        for case in cases
    ]
    return "\n".join([shared_text(cases), line(table[0], titles=True), *map(line, table)])


def parse_filters(texts: Iterable[str]) -> dict[str, set[str]]:
    """`key=value` texts; several values of one key are alternatives."""
    filters: dict[str, set[str]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ValueError(f"--filter must be key=value; got {text!r}")
        filters.setdefault(key, set()).add(value)
    return filters


def select(cases: Sequence[Case], filters: dict[str, set[str]]) -> list[Case]:
    return [case for case in cases if all(str(case.get(key)) in values for key, values in filters.items())]


def parser(name: str, l2: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog=f"bench_{name}")
    add = result.add_argument
    add("--json", type=Path, metavar="FILE", help="append header and rows as one line of JSON")
    add("--compare", type=Path, metavar="FILE", help="print the ratio to the newest such row of FILE")
    add("--readme", type=Path, metavar="FILE", help="rewrite the table between this bench's markers")
    add("--filter", action="append", default=[], metavar="KEY=VALUE", help="only such cases")
    add("--peers", action=argparse.BooleanOptionalAction, default=True, help="time the peers too")
    add("--l2", choices=("warm", "cold"), default=l2, help="L2 before each call (default: %(default)s)")
    add("--quick", action="store_true", help="short durations")
    add("--list", action="store_true", help="print the cases; needs no GPU")
    return result


def run(device: timing.Device, bench: Bench, cases: Sequence[Case], args: argparse.Namespace) -> int:
    """Measure and print all cases; 1 if a result was wrong, else 0."""
    import cuattn

    durations = timing.QUICK if args.quick else timing.FULL
    header: Row = {
        "bench": bench.name,
        **device.describe(),
        "cuattn": getattr(cuattn, "__version__", "unversioned"),
        "revision": revision(),
        "l2": args.l2,
        "clocks": "unlocked",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    baseline = load_baseline(args.compare, header) if args.compare else None
    header |= timing.ceilings(device, bench.flops is not None, durations)
    device.release()
    print(header_text(header), shared_text(cases), sep="\n", flush=True)
    rows: list[Row] = []
    try:
        for case in cases:
            row = measure(device, bench, case, args.l2, durations)
            add_percentages(row, header)
            rows.append(row)
            # A peer that cannot be imported is missing from every row, so the first row knows the columns.
            groups = cells(row, cases, rows[0]["peers"], baseline)
            if len(rows) == 1:
                print(line(groups, titles=True))
            print(line(groups), flush=True)
            for name, entry in {"cuattn": row, **row["peers"]}.items():
                if note := entry.get("error") or entry["note"]:
                    print(f"    {name}: {note.splitlines()[0]}", flush=True)
            device.release()
    finally:  # what was measured is kept when a later case fails
        if args.json and rows:
            append_json(args.json, header, rows)
    if args.readme:
        update_readme(args.readme, bench.name, f"{header_text(header)}\n\n{markdown(rows)}")
    return int(any(row["wrong"] for row in rows))


def main(
    name: str,
    cases: Sequence[Case],
    setup: Setup,
    *,
    bytes_moved: Callable[[Case], int] | None = None,
    flops: Callable[[Case], int] | None = None,
    peers: dict[str, Setup] | None = None,
    l2: str = "warm",
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Command line of a bench; exits 0, 1 after a wrong result, 2 without CuPy or a GPU or with bad arguments."""
    cli = parser(name, l2)
    args = cli.parse_args(argv)
    try:
        cases = select(cases, parse_filters(args.filter))
    except ValueError as error:
        cli.error(str(error))
    if not cases:
        cli.error("no case passes the filters; --list prints the cases")
    if args.compare and not args.compare.is_file():
        cli.error(f"--compare: no file {args.compare}")
    bench = Bench(name, setup, bytes_moved, flops, (peers or {}) if args.peers else {})
    if args.list:
        print(listing(bench, cases))
        sys.exit(0)
    if reason := gpu.missing_gpu():
        print(f"bench_{name}: {reason}; only --list needs no GPU", file=sys.stderr)
        sys.exit(2)
    device = gpu.GpuDevice(use_torch=bool(bench.peers or flops))
    with device.current():
        sys.exit(run(device, bench, cases, args))
