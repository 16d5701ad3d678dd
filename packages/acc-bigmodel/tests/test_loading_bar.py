"""The progress bar of a load."""

from __future__ import annotations

from typing import Any

import pytest

from acc_bigmodel import loading_bar
from acc_bigmodel.loading_bar import LoadingBar
from acc_ops.testing import run_threads


class Bar:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.updates: list[int] = []
        self.is_closed = False

    def update(self, nbytes: int) -> None:
        self.updates.append(nbytes)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def with_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_bar, "is_available", lambda name: True)


def load(seconds: list[float]) -> list[Bar]:
    """The bars that are made when 10 bytes are loaded at each of these times."""
    times = iter([0.0, *seconds])
    bars: list[Bar] = []

    def make(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    with LoadingBar(clock=lambda: next(times), make=make) as bar:
        for _ in seconds:
            bar.expect(10)
        for _ in seconds:
            bar.advance(10)
    return bars


def test_a_load_of_less_than_a_second_shows_nothing() -> None:
    assert load([0.3, 0.9]) == []


def test_a_load_that_lasts_is_shown_with_what_is_done_so_far() -> None:
    (bar,) = load([0.5, 1.1, 1.2, 1.3])
    assert (bar.options["total"], bar.options["initial"], bar.options["unit"]) == (40, 20, "B")
    assert bar.updates == [10, 10]
    assert bar.is_closed


def test_a_load_that_fails_closes_its_bar() -> None:
    bars: list[Bar] = []

    def make(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    times = iter([0.0, 5.0])
    with pytest.raises(RuntimeError), LoadingBar(clock=lambda: next(times), make=make) as bar:
        bar.advance(1)
        raise RuntimeError
    assert bars[0].is_closed


def test_only_the_first_rank_of_a_machine_shows_it() -> None:
    assert [len(bars) for bars in run_threads(3, lambda: load([5.0]))] == [1, 0, 0]


def test_without_tqdm_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_bar, "is_available", lambda name: False)
    assert load([5.0]) == []
