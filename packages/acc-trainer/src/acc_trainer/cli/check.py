"""`acc test`: launch a small script that checks that processes work together and train."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from acc_trainer.cli import launch

USAGE = "usage: acc test [options of acc launch]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bundled script through `acc launch` with the options given; its exit code comes back."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["-h"], ["--help"]):
        print(f"{USAGE}\n\nStart a small script that checks ranks, gathering, broadcasting and training.")
        return 0
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "check_script.py")
    return launch.main([*words, script], command="acc test")
