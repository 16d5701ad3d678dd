"""The distribution that `importlib.metadata` finds under the name `accelerate` while it is ours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any

from acc_compat.names import INTERFACE, INTERFACE_VERSION

TEXTS = {
    "METADATA": (
        f"Metadata-Version: 2.1\nName: {INTERFACE}\nVersion: {INTERFACE_VERSION}\n"
        "Summary: the interface of that version, answered by acc-compat\n"
    ),
    "INSTALLER": "acc-compat\n",
    "top_level.txt": f"{INTERFACE}\n",
}


class AliasDistribution(Distribution):
    """Name, version and top-level module; there are no files, because none is installed under the name."""

    def read_text(self, filename: Any) -> str | None:
        return TEXTS.get(str(filename))

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


def matching(context: DistributionFinder.Context | None) -> Iterable[Distribution]:
    """The distribution, if `context` asks for its name or for all, and for what this interpreter can import."""
    if context is not None and "path" in vars(context):
        return []  # somebody lists the files of a folder: we are in none
    asked = None if context is None else context.name
    if asked is None or re.sub(r"[-_.]+", "-", asked).lower() == INTERFACE:
        return [AliasDistribution()]
    return []
