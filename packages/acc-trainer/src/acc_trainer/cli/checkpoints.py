"""`acc checkpoints FOLDER`: which checkpoints lie there, which are whole, and which one a run would take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from acc_trainer.checkpoint.layout import FOLDER, MANIFEST, CheckpointError
from acc_trainer.checkpoint.listing import Checkpoints, look, look_at
from acc_trainer.launch.errors import LaunchError

USAGE = "usage: acc checkpoints [--check] FOLDER"
HELP = f"""{USAGE}

FOLDER is a project's folder, a folder of checkpoints, or one checkpoint. No tensor is read, unless
  --check    compare every byte with its checksum

Exit code: 0 when something whole is there (with --check: and nothing else), 1 when not, 2 for a mistake.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit code is for scripts: see the help."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if words else 2
    try:
        check, folder = _read(words)
        found = _look(folder)
        found = found.check() if check else found
    except (LaunchError, CheckpointError) as error:
        print(f"acc checkpoints: {error}", file=sys.stderr)
        return 2
    print(found)
    named = [one.whole for one in found if not one.path.name.startswith(".")]  # a half save counts as none
    return 0 if any(named) and (not check or all(named)) else 1


def _read(words: Sequence[str]) -> tuple[bool, Path]:
    folders = [word for word in words if word != "--check"]
    if len(folders) != 1 or folders[0].startswith("-"):
        raise LaunchError(f"expected one folder, got {' '.join(words)!r}. {USAGE}")
    folder = Path(folders[0])
    if not folder.is_dir():
        raise LaunchError(f"there is no folder {folder}")
    return "--check" in words, folder


def _look(folder: Path) -> Checkpoints:
    """One checkpoint, the checkpoints of a project, or those in the folder."""
    one = look_at(folder) if (folder / MANIFEST).exists() else None
    if one is not None:
        return Checkpoints(folder.parent, [one])
    home = folder / FOLDER
    return look(home if home.is_dir() else folder)


if __name__ == "__main__":
    sys.exit(main())
