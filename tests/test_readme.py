"""The Python code of the README runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(section.split("\n", 1) for section in TEXT.split("\n## ")[1:])
BLOCKS = {name: code for name, text in SECTIONS.items() for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)}


def test_blocks_are_found():
    assert list(BLOCKS) == ["States", "Attention of prompts", "Pages and decode"] and TEXT.count("```python") == len(BLOCKS)


@pytest.mark.parametrize("section", BLOCKS)
def test_a_block_runs_and_prints_what_it_says(backend, capsys, section):
    code = BLOCKS[section]
    if backend.name == "gpu":
        code = code.replace("xp, rng = np,", "import cupy as xp; rng =")
    exec(compile(code, f"README.md, {section}", "exec"), {})
    said = re.findall(r"^print\(.*\) +# (.*)$", code, re.MULTILINE)
    assert said and capsys.readouterr().out.splitlines() == said
