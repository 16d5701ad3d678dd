"""The table of what works with what."""

from __future__ import annotations

import pytest

from acc_ops.devices import DEVICE_TABLE
from acc_plugins.strategies.ddp import DDPStrategy
from acc_plugins.strategies.replicated import ReplicatedStrategy
from acc_plugins.strategies.strategy import Strategy
from acc_plugins.support import (
    PRECISIONS,
    STRATEGIES,
    UnsupportedError,
    check_support,
    support,
    support_table,
)

KINDS = [row.kind for row in DEVICE_TABLE]


def test_the_table_knows_every_strategy_class() -> None:
    assert set(STRATEGIES) == {kind.name for kind in (Strategy, DDPStrategy, ReplicatedStrategy)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_check_agrees_with_the_table(strategy: str, precision: str, kind: str) -> None:
    cell = support(strategy, precision, kind)
    if cell.works:
        check_support(strategy, precision, kind)
        assert cell.run == (kind == "cpu")
    else:
        with pytest.raises(UnsupportedError, match="does not work on") as caught:
            check_support(strategy, precision, kind)
        assert cell.reason in str(caught.value)


def test_float32_on_one_device_works_everywhere() -> None:
    assert all(support("single", "no", kind).works for kind in KINDS)


def test_everything_works_on_the_cpu_and_was_run_there() -> None:
    cells = [support(strategy, precision, "cpu") for strategy in STRATEGIES for precision in PRECISIONS]
    assert all(cell.works and cell.run for cell in cells)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("fsdp9", "no", "cpu"), "strategy"),
        (("ddp", "fp3", "cpu"), "precision"),
        (("ddp", "no", "tin"), "device kind"),
    ],
)
def test_unknown_words_are_refused_with_the_known_ones(arguments: tuple[str, str, str], word: str) -> None:
    with pytest.raises(UnsupportedError, match=f"unknown {word}.*choose one of"):
        support(*arguments)


def test_the_markdown_table_has_a_row_per_pair_and_a_column_per_device() -> None:
    header, rule, *rows = support_table().splitlines()
    assert len(rows) == len(STRATEGIES) * len(PRECISIONS)
    columns = {line.count("|") for line in (header, rule, *rows)}
    assert columns == {len(KINDS) + 3}
    assert "not run on real hardware" in support_table()
    assert "no: torch.distributed has no backend for mps" in support_table()
