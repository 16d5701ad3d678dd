"""python -m acc_compat [--force] (script.py | folder | file.zip | -m module) [arguments]: run it with `accelerate` meaning acc.

The program sees what `python script.py arguments` would show it, and its children answer to the name as well, through
ACC_COMPAT. `--force` replaces an installed accelerate; without it that is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from acc_compat import program, startup
from acc_compat.alias import install, installed
from acc_compat.errors import NameTakenError
from acc_ops.environment import patch_environment

USAGE = (__doc__ or "").strip()


def main(arguments: Sequence[str]) -> None:
    """Run what the arguments name; exits with 2 and the usage when they name nothing."""
    rest = list(arguments)
    force = rest[:1] == ["--force"]
    rest = rest[force:]
    if rest[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    as_module = rest[:1] == ["-m"]
    rest = rest[as_module:]
    if not rest or (rest[0].startswith("-") and not as_module):
        _stop(f"{'unknown option ' + rest[0] if rest else 'no program'}\n{USAGE}", 2)
    try:
        install(force)
    except NameTakenError as error:
        _stop(str(error), 2)
    answering = installed()
    value = startup.FORCED if answering and answering.forced else startup.ON
    with patch_environment(**{startup.VARIABLE: value}):
        sys.argv[:] = ["-m" if as_module else rest[0], *rest[1:]]  # what a package's __init__ may look at
        try:
            found = program.from_module(rest[0]) if as_module else program.from_path(rest[0])
        except program.ProgramError as error:
            _stop(str(error), error.code)
        program.run(found, rest[1:])


def _stop(message: str, code: int) -> None:
    print(f"acc_compat: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
