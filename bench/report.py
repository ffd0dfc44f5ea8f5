"""What a bench prints and keeps: rows of text, Markdown, JSON lines, the table in the README."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Case = dict[str, Any]
Row = dict[str, Any]  # plain JSON values, so that a row read back from a file is the row that was written

ROOT = Path(__file__).resolve().parent.parent

Cell = tuple[str, str, int]  # title, text, least width


def number(value: float | None) -> str:
    """Three or four significant digits; a dash for what was not measured."""
    if value is None:
        return "-"
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0}f}"


def time_text(entry: Row) -> str:
    star = "*" if entry["mode"] == "eager" else ""
    return number(entry["gpu_us"]["median"]) + star


def error_text(entry: Row) -> str:
    value = entry["err_over_bound"]
    if not entry["wrong"]:
        return number(value)
    return "WRONG" if value is None else f"WRONG {value:.3g}"


def constants(cases: Sequence[Case]) -> Case:
    """Fields that are the same in all of several cases; they are printed once, above the table."""
    if len(cases) < 2:
        return {}
    return {key: value for key, value in cases[0].items() if all(c.get(key) == value for c in cases)}


def case_cells(case: Case, cases: Sequence[Case]) -> list[Cell]:
    """Fields of `case` that vary over `cases`, as wide as the widest of them."""
    keys = dict.fromkeys(key for other in cases for key in other if key not in constants(cases))
    widths = {key: max(len(str(other.get(key, "-"))) for other in cases) for key in keys}
    return [(key, str(case.get(key, "-")), widths[key]) for key in keys]


def peer_cells(name: str, entry: Row | None) -> list[Cell]:
    if entry is None or "error" in entry:
        texts = ("-" if entry is None else "failed", "-")
    else:
        ratio = "{median:.2f} ({min:.2f}-{max:.2f})".format(**entry["ratio"])
        texts = (time_text(entry), error_text(entry) if entry["wrong"] else ratio)
    return [(f"{name} µs", texts[0], 8), ("ratio", texts[1], 16)]


def cells(
    row: Row, cases: Sequence[Case], peers: Iterable[str], baseline: dict[str, float] | None = None
) -> list[list[Cell]]:
    """The row in groups; its titles depend only on the bench, so that any row of a table can give them."""
    gpu = row["gpu_us"]
    groups = [
        [*case_cells(row["case"], cases), ("L2", row["l2"], 10)],
        [
            ("gpu µs", time_text(row), 8),
            ("(p10-p90)", f"({number(gpu['p10'])}-{number(gpu['p90'])})", 15),
            ("host µs", number(row["host_us"]), 7),
        ],
    ]
    if "gb_per_s" in row:
        groups.append([("GB/s", number(row["gb_per_s"]), 6), ("% copy", number(row["copy_percent"]), 6)])
    if "tflop_per_s" in row:
        percent = number(row["matmul_percent"])
        groups.append([("TFLOP/s", number(row["tflop_per_s"]), 7), ("% matmul", percent, 8)])
    groups.append([("err/bound", error_text(row), 9)])
    groups += [peer_cells(name, row["peers"].get(name)) for name in peers]
    if baseline is not None:
        old = baseline.get(row_key(row))
        groups.append([("now/then", number(old and gpu["median"] / old), 8)])
    return groups


def line(groups: list[list[Cell]], titles: bool = False) -> str:
    """One aligned line: the texts, or the titles above them."""
    return " | ".join(
        " ".join((title if titles else text).rjust(max(width, len(title))) for title, text, width in group)
        for group in groups
    )


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table for a README; fields that all rows share stand above it."""
    cases = [row["case"] for row in rows]
    peers = dict.fromkeys(peer for row in rows for peer in row["peers"])
    table = [[cell for group in cells(row, cases, peers) for cell in group] for row in rows]
    lines = [[title for title, _, _ in table[0]], ["---:"] * len(table[0])]
    lines += [[text for _, text, _ in row] for row in table]
    shared = ", ".join(f"{key} {value}" for key, value in constants(cases).items())
    return (f"{shared}\n\n" if shared else "") + "\n".join(f"| {' | '.join(texts)} |" for texts in lines)


def header_text(header: Row) -> str:
    """On what was measured, what that card gives at best, and what the columns mean."""
    matmul = header["matmul_tflop_per_s"]
    return "\n".join(
        (
            "{bench}  {gpu}, {sms} SM  CUDA driver {driver}, runtime {runtime}  cupy {cupy}"
            "  cuattn {cuattn} ({revision})  L2 {l2}  clocks {clocks}  {date}".format(**header),
            f"measured now: copy of 1 GiB {header['copy_gb_per_s']:.0f} GB/s"
            + (f", bf16 matmul 8192 {matmul:.0f} TFLOP/s" if matmul else ""),
            "GB/s = 1e9 bytes/s; time = median (p10-p90); ratio = cuattn / peer (range over rounds); "
            "* = eager, not a graph",
        )
    )


def shared_text(cases: Sequence[Case]) -> str:
    return "all rows: " + (
        "  ".join(f"{key}={value}" for key, value in constants(cases).items()) or "none shared"
    )


def row_key(row: Row) -> str:
    """What must agree for two rows to be compared."""
    return json.dumps([row["case"], row["l2"]], sort_keys=True)


def append_json(path: Path, header: Row, rows: list[Row]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"header": header, "rows": rows}, allow_nan=False) + "\n")


def load_baseline(path: Path, header: Row) -> dict[str, float]:
    """Newest median of each row of this bench on this GPU; files are appended to, so later lines win."""
    medians: dict[str, float] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(text)
        if all(entry["header"][key] == header[key] for key in ("bench", "gpu")):
            medians |= {row_key(row): row["gpu_us"]["median"] for row in entry["rows"]}
    return medians


def update_readme(path: Path, name: str, table: str) -> None:
    """Put `table` between the two markers of bench `name`."""
    start_mark, end_mark = f"<!-- bench:start {name} -->", f"<!-- bench:end {name} -->"
    text = path.read_text(encoding="utf-8")
    head, found_start, rest = text.partition(start_mark)
    _, found_end, tail = rest.partition(end_mark)
    if not (found_start and found_end):
        raise ValueError(f"update_readme: {path.name} must contain {start_mark} and then {end_mark}")
    path.write_text(f"{head}{start_mark}\n{table.strip()}\n{end_mark}{tail}", encoding="utf-8")


def revision(root: Path = ROOT) -> str:
    """Short git revision of a checkout (with "-dirty"), else a digest of the sources."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return result.stdout.strip()
    digest = hashlib.sha256()
    for folder in ("cuattn", "kernels_cu"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return "digest " + digest.hexdigest()[:8]
