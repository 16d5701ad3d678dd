"""What every strategy and every precision must keep, as test classes: subclass one, say how yours is made, and pytest runs the rest.

    class TestMine(StrategyContract):
        size = 2

        def make_strategy(self, world, precision):
            return MyStrategy(world, precision)

Ranks are threads; a strategy that needs processes overrides `on_ranks`, as integration-tests/test_ddp.py does. Imports no pytest.
"""

from __future__ import annotations

from acc_plugins.precisions.contract import PrecisionContract
from acc_plugins.strategies.contract import SkippingPrecision, StrategyContract

__all__ = ["PrecisionContract", "SkippingPrecision", "StrategyContract"]
