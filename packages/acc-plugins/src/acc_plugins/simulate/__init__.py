"""What a training step would cost on up to thousands of ranks, found without them."""

from __future__ import annotations

from acc_plugins.simulate.report import Simulation as Simulation
from acc_plugins.simulate.run import simulate as simulate
from acc_plugins.simulate.traffic import Traffic as Traffic
