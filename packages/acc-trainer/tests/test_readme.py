"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from acc_trainer import Accelerator
from acc_trainer.state import AcceleratorState

README = Path(__file__).parents[1] / "README.md"
CODE = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(autouse=True)
def a_folder_and_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    yield
    AcceleratorState._reset_state(True)


def _run(code: str) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    return names


@pytest.mark.parametrize("code", CODE, ids=range(1, len(CODE) + 1))
def test_an_example_runs(code: str) -> None:
    assert "Accelerator(" in code, "an example is a whole script"
    _run(code)


def test_the_script_that_resumes_ends_as_if_it_had_not_been_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [code for code in CODE if "rest_of_epoch" in code]
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = _run(code)["model"]
    monkeypatch.chdir(tmp_path)

    class Killed(Exception):
        """As by a scheduler."""

    real, left = Accelerator.save_state, 2

    def save_then_die(self: Accelerator) -> str:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "save_state", save_then_die)
        with pytest.raises(Killed):
            _run(code)
    AcceleratorState._reset_state(True)
    resumed = _run(code)["model"]
    assert torch.equal(resumed.weight, whole.weight)
    assert torch.equal(resumed.bias, whole.bias)
    assert Path("runs", "one", "export", "model.safetensors").is_file()
