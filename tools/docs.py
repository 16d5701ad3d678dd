"""Write the generated pages of docs/, check every relative link and that every file is explained: `hatch run docs`, or with `--check` to only compare."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

from workspace import ROOT, Package, packages

LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
COLUMNS = ("option", "environment", "type", "default", "meaning")  # no command takes their flags yet
RAN_WITH = {  # tracker -> version of its library with which integration-tests/test_trackers.py last ran
    "aim": "aim 3.29.1",
    "clearml": "clearml 2.1.12, offline",
    "comet_ml": "comet-ml 3.58.8, offline",
    "dvclive": "dvclive 3.49.1, without git",
    "mlflow": "mlflow 3.17.2, SQLite store",
    "swanlab": "swanlab 0.10.3, offline",
    "tensorboard": "tensorboard 2.21.0",
    "trackio": "trackio 0.43.0, local",
    "wandb": "wandb 0.31.0, offline",
}
GENERATED = "<!-- written by `hatch run docs`; change the declarations, not this page -->\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail when a page is out of date or a link is broken",
    )
    arguments = parser.parse_args()
    stale = []
    for name, text in pages().items():
        path = ROOT / "docs" / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not arguments.check:
            path.write_text(text)
    problems = [f"docs/{name} is out of date: run `hatch run docs`" for name in stale if arguments.check]
    problems += [*broken_links(), *unexplained_files()]
    for problem in problems:
        print(problem)
    print(f"{len(pages())} generated pages, {len(stale)} {'out of date' if arguments.check else 'written'}")
    sys.exit(1 if problems else 0)


def pages() -> dict[str, str]:
    """File name -> text of the generated pages."""
    return {"support.md": support_page(), "options.md": options_page()}


def support_page() -> str:
    """Which strategy works with which precision on which device, from the one table that also raises the errors."""
    from acc_plugins.support import support_table  # noqa: PLC0415  needs the packages; sizes and links don't

    return f"# What works with what\n\n{GENERATED}{support_table()}\n## Trackers\n\n{tracker_table()}"


def tracker_table() -> str:
    """What each tracker takes besides values, from its methods, and the version of its library that really ran (integration-tests/test_trackers.py)."""
    from acc_trainer.tracking.registry import LOGGER_TYPE_TO_CLASS  # noqa: PLC0415

    rows = ["| `log_with` | class | also takes | run with |", "| --- | --- | --- | --- |"]
    for name, kind in LOGGER_TYPE_TO_CLASS.items():
        extra = sorted(one for one in dir(kind) if one.startswith("log_") and callable(getattr(kind, one)))
        shown = ", ".join(f"`{one}`" for one in extra)
        rows.append(f"| {name} | `{kind.__name__}` | {shown} | {RAN_WITH.get(name, 'needs no library')} |")
    return "\n".join(rows) + "\n"


def options_page() -> str:
    """Every option with its flag, YAML key, environment variable and default, from its one declaration."""
    from acc_ops.options import as_table  # noqa: PLC0415
    from acc_trainer.launch.options import LaunchOptions  # noqa: PLC0415

    parts = ["# Options\n\n" + GENERATED.rstrip(), "## acc launch", as_table(LaunchOptions).rstrip()]
    for owner in option_classes():
        summary = (owner.__doc__ or "").strip().splitlines()[0]
        parts += [f"## {owner.__name__}", summary, as_table(owner, COLUMNS).rstrip()]
    return "\n\n".join(parts) + "\n"


def option_classes() -> list[type]:
    """The dataclasses that declare options: how ranks wait, then those of acc-plugins by name."""
    import acc_plugins  # noqa: PLC0415
    from acc_ops.options import options_of  # noqa: PLC0415
    from acc_ops.watch import WatchOptions  # noqa: PLC0415

    named = [getattr(acc_plugins, name) for name in acc_plugins.__all__]
    return [WatchOptions] + [c for c in named if isinstance(c, type) and is_dataclass(c) and options_of(c)]


def unexplained_files() -> Iterator[str]:
    """Modules that neither the file map of docs/architecture.md nor their package's own pages name."""
    file_map = (ROOT / "docs" / "architecture.md").read_text()
    for package in packages():
        known = set(re.findall(r"\w+", file_map + "".join(page.read_text() for page in own_pages(package))))
        for path in sorted((package.folder / "src").glob("*/*.py")):
            if not path.stem.startswith("__") and path.stem not in known:
                yield f"{path.relative_to(ROOT)}: no page says what it is; name it in docs/architecture.md or its package's README or DESIGN"


def own_pages(package: Package) -> list[Path]:
    """The hand-written pages beside a package."""
    return [page for name in ("README.md", "DESIGN.md") if (page := package.folder / name).exists()]


def broken_links() -> Iterator[str]:
    """Relative links of the hand-written pages that lead nowhere."""
    files = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *(page for package in packages() for page in own_pages(package)),
    ]
    for path in files:
        for target in LINK.findall(path.read_text()):
            if (
                "://" not in target
                and not target.startswith("mailto:")
                and not (path.parent / target).exists()
            ):
                yield f"{path.relative_to(ROOT)}: the link to {target} leads nowhere"


if __name__ == "__main__":
    main()
