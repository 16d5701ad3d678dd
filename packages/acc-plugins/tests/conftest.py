"""Hypothesis as in all our tests."""

from __future__ import annotations

from acc_ops.testing import use_test_profile

use_test_profile()
