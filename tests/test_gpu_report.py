"""The report of layer 5: what counts as fresh. No GPU needed."""

from __future__ import annotations

import json

import pytest

from tests import gpu_report

GOOD = {"exit": 0, "passed": 3, "failed": 0, "skipped": 0}


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, 0),
        ({"digest": "of other sources"}, 1),
        ({"runs": {"gpu": GOOD, "sanitizer": GOOD | {"failed": 1}}}, 1),
        ({"runs": {"gpu": GOOD | {"exit": 5, "passed": 0}, "sanitizer": GOOD}}, 1),
        ({"runs": {"gpu": GOOD | {"passed": 0}, "sanitizer": GOOD}}, 1),
    ],
    ids=["good", "other sources", "a failure", "no test collected", "none passed"],
)
def test_only_a_good_run_of_these_sources_is_fresh(tmp_path, monkeypatch, capsys, changed, status):
    report = {"device": "d", "date": "2026-01-01", "digest": gpu_report.digest(), "runs": {"gpu": GOOD, "sanitizer": GOOD}}
    monkeypatch.setattr(gpu_report, "REPORT", tmp_path / "report.json")
    (tmp_path / "report.json").write_text(json.dumps(report | changed))
    assert gpu_report.check() == status
    assert capsys.readouterr().out.startswith("stale" if status else "fresh")


def test_no_report_is_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "REPORT", tmp_path / "none.json")
    assert gpu_report.check() == 1
