"""The benches' harness without a GPU: texts and files of a report."""

import json

import pytest

from bench import report
from tests.bench_fakes import CASES


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
