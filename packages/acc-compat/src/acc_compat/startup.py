"""What `acc_compat.pth` calls when Python starts with ACC_COMPAT set: the name is answered in this process too."""

from __future__ import annotations

import sys

from acc_compat.alias import install
from acc_compat.errors import NameTakenError

VARIABLE = "ACC_COMPAT"
ON, FORCED = "1", "force"


def answer(value: str) -> None:
    """Obey the variable's value; what cannot be done is told on stderr, because a start-up must go on.

    An error of any other kind reaches `site`, which prints it and goes on too.
    """
    if value not in (ON, FORCED):
        print(f"acc-compat: {VARIABLE} is {value!r}: use 1, force, or 0. Nothing is done.", file=sys.stderr)
        return
    try:
        install(force=value == FORCED)
    except NameTakenError as error:
        print(f"acc-compat: {error}", file=sys.stderr)
