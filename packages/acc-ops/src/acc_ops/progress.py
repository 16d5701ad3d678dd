"""A progress bar that only one rank of a machine shows."""

from __future__ import annotations

from typing import Any

from acc_ops.optional import require
from acc_ops.world import current_world


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown on the first rank of each machine only, unless `main_process_only=False`.

    ImportError without tqdm; ValueError for a boolean as the first argument (the option is a keyword).
    """
    bar = require("tqdm.auto", "a progress bar")
    if args and isinstance(args[0], bool):
        raise ValueError(
            f"the first argument is what to iterate over, got {args[0]!r}: write main_process_only={args[0]!r}"
        )
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = not current_world().is_local_main
    return bar.tqdm(*args, **kwargs)
