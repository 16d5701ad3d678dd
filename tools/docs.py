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
VARIABLES = {  # that no option declares
    "ACCELERATE_BYPASS_DEVICE_MAP": "`prepare` takes models that a device map has spread over several devices, on several processes too",
    "ACCELERATE_DEBUG_RDV_FILE": "file through which the ranks of `PrepareForLaunch(debug=True)` meet",
    "ACCELERATE_ENABLE_RICH": "`is_rich_available()` says yes where rich is installed",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "`init_empty_weights` leaves buffers without memory too",
    "ACCELERATE_LOG_LEVEL": "level of the loggers of `get_logger`",
    "ACC_COMPAT": "`import accelerate` means acc in this process and its children; `force`: in place of an installed accelerate",
    "ACC_RECORD_RUNS": "file in which the strategy contract notes what passed: docs/support.md shows it",
    "ACC_TRY_FAKE_ACCELERATOR": "the fake accelerator of the tests is set up with a torch it was not tried with",
    "CLEARML_PROJECT": "project of the ClearML tracker",
    "CLEARML_TASK": "task of the ClearML tracker",
    "FORK_LAUNCHED": "set by the notebook launcher in the processes that it forks",
    "HF_HOME": "folder whose `accelerate/default_config.yaml` is read",
    "MLFLOW_EXPERIMENT_NAME": "experiment of the MLflow tracker",
    "MLFLOW_NESTED_RUN": "the MLflow run is nested in one that is active",
    "MLFLOW_RUN_ID": "MLflow run that goes on",
    "MLFLOW_TAGS": "tags of the MLflow run, as JSON",
    "NODE_RANK": "this machine among those of `PrepareForLaunch`",
    "NPROC": "processes on each of these machines",
    "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT": "who a process is, set by launchers; "
    "where they are absent, those of MPI and SLURM (`acc_ops.ranks`) are read",
    "ACCELERATE_USE_MEGATRON_LM": "`is_megatron_lm_available()` says yes where megatron-core is installed",
    "CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES": "which GPUs a process sees; so with the other device kinds' own",
    "USE_TORCH_XLA": "`0`: torch_xla is not used, also where it is installed",
}
READERS = re.compile(r'(?:parse_\w+_from_env|get_int_from_env|_is_asked_for)\(\s*\[?"([A-Z][A-Z0-9_]+)"')
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
    problems += [*broken_links(), *unexplained_files(), *unlisted_variables()]
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
    rows = ["| environment | meaning |", "| --- | --- |"]
    rows += [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    parts += ["## Variables that no option declares", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def option_classes() -> list[type]:
    """The dataclasses that declare options: how ranks wait, then those of acc-plugins by name."""
    import acc_plugins  # noqa: PLC0415
    from acc_ops.options import options_of  # noqa: PLC0415
    from acc_ops.watch import WatchOptions  # noqa: PLC0415

    named = [getattr(acc_plugins, name) for name in acc_plugins.__all__]
    return [WatchOptions] + [c for c in named if isinstance(c, type) and is_dataclass(c) and options_of(c)]


def unlisted_variables() -> Iterator[str]:
    """Variables that our code reads by name and docs/options.md does not have."""
    listed = set(re.findall(r"[A-Z][A-Z0-9_]+", options_page()))
    for package in packages():
        for path in sorted((package.folder / "src").rglob("*.py")):
            for name in sorted(set(READERS.findall(path.read_text())) - listed):
                yield f"{path.relative_to(ROOT)}: it reads {name}, which no option declares; say what it means in VARIABLES of tools/docs.py"


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
