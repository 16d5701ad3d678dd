"""The README's examples run as they stand, and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


ALL = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
CODE = [code for code in ALL if "acc_trainer" not in code]  # the others: integration-tests/test_choices.py


def test_the_loop_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(CODE[0], str(README), "exec"), {})
    assert capsys.readouterr().out.count("ran: True") == 3


@pytest.mark.parametrize("code", CODE[1:], ids=range(2, len(CODE) + 1))
def test_an_example_prints_what_stands_beside_it(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, str(README), "exec"), {})
    said = re.findall(r"print\(.*\)  # (.*)", code)
    assert said
    assert capsys.readouterr().out.splitlines() == said
