"""Stand-ins for tracking libraries: modules that note every call, so that the trackers are tested without the libraries."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from acc_trainer.tracking.registry import LOGGER_TYPE_TO_CLASS
from acc_trainer.tracking.tracker import GeneralTracker


class Recorder:
    """Notes what is called on it and below it, as (dotted name, args, kwargs); calls return a recorder, unless `answers` has a value."""

    def __init__(self, path: str = "", notes: list[Any] | None = None, answers: dict[str, Any] | None = None):
        self._path = path
        self.notes = notes if notes is not None else []
        self.answers = answers if answers is not None else {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self._path}.{name}" if self._path else name
        if path in self.answers and not callable(self.answers[path]):
            return self.answers[path]
        return Recorder(path, self.notes, self.answers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.notes.append((self._path, args, kwargs))
        answer = self.answers.get(f"{self._path}()", self)
        if isinstance(answer, Exception):
            raise answer
        return Recorder(f"{self._path}()", self.notes, self.answers) if answer is self else answer

    def __setitem__(self, key: str, value: Any) -> None:
        self.notes.append((f"{self._path}[]", (key, value), {}))

    def calls(self, name: str) -> list[Any]:
        """(args, kwargs) of every call of `name`."""
        return [(args, kwargs) for path, args, kwargs in self.notes if path == name]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:
    """`stand_in("wandb")`: from now on the module wandb is a recorder."""

    def put(name: str, **answers: Any) -> Recorder:
        recorder = Recorder(answers=answers)
        module = types.ModuleType(name)
        module.__getattr__ = recorder.__getattr__
        monkeypatch.setitem(sys.modules, name, module)
        return recorder

    return put


@pytest.fixture
def table():
    """The table of trackers, put back afterwards."""
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield LOGGER_TYPE_TO_CLASS
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


class Noting(GeneralTracker):
    """Keeps what it is told."""

    name = "noting"
    requires_logging_directory = False

    def __init__(self, run_name="", **kwargs):
        super().__init__()
        self.run_name, self.kwargs, self.calls = run_name, kwargs, []

    @property
    def tracker(self):
        return self.calls

    def start(self):
        self.calls.append("start")

    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    def log(self, values, step=None, **kwargs):
        self.calls.append((values, step, kwargs))

    def finish(self):
        self.calls.append("finish")


@pytest.fixture
def noting() -> type[Noting]:
    """A tracker class that keeps what it is told in `calls`."""
    return Noting
