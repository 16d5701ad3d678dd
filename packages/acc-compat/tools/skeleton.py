"""Prints the table of names for a contract file, keeping every home that the present table already knows.

python packages/acc-compat/tools/skeleton.py contract.json > new-names.txt

A maintainer's tool for a new version of the interface: the project itself never reads a contract file.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAMES = Path(__file__).parents[1] / "src" / "acc_compat" / "names.txt"
LEFT_OUT = re.compile(r"commands\.menu|memory_utils|utils\.rich")  # private menus, a deprecated alias
NOISE = {"TYPE_CHECKING", "v", "i", "additional_kwargs"}  # loop variables and the like, not an interface
OWNERS = {  # data that several modules show: the one that holds it
    "DEFAULT_LAUNCH_COMMAND": "test_utils.testing",
    "DYNAMO_BACKENDS": "commands.config.config_utils",
    "LOGGER_TYPE_TO_CLASS": "tracking",
    "cache_dir": "commands.config.config_args",
    "default_config_file": "commands.config.config_args",
    "default_json_config_file": "commands.config.config_args",
    "default_yaml_config_file": "commands.config.config_args",
    "device_count": "test_utils.testing",
    "torch_device": "test_utils.testing",
}
RENAMED = {  # what utils shows from megatron_lm under a longer name
    f"megatron_lm_{name}": name
    for name in (
        "initialize",
        "prepare_data_loader",
        "prepare_model_optimizer_scheduler",
        "prepare_optimizer",
        "prepare_scheduler",
    )
}


def short(module: str) -> str:
    """`accelerate.utils` -> `utils`; `accelerate` -> `.`."""
    return module.partition(".")[2] or "."


def known_homes(path: Path) -> dict[tuple[str, str], str]:
    """(module, name) -> home, as the present table has it."""
    homes: dict[tuple[str, str], str] = {}
    module = ""
    for line in path.read_text().splitlines() if path.exists() else ():
        text = line.split("#")[0].strip()
        if text.startswith("["):
            module = text.strip("[]")
        elif text and not line[0].isspace() and not text.startswith("from "):
            name, home = text.split()
            homes[module, name] = home
    return homes


def sections(contract: Mapping[str, Any]) -> Iterator[tuple[str, set[str], dict[str, set[str]]]]:
    """(module, names it defines, owner -> names it shows from there) for every module of the contract."""
    modules = {short(k): v for k, v in contract["modules"].items() if not LEFT_OUT.match(short(k))}
    constants = set(modules["utils.constants"]["data"])
    conditional = [n for names in contract["conditional_exports"].values() for n in names]
    for module, entry in modules.items():
        defines = {n for n, what in entry.get("defines", {}).items() if not n.startswith("_")}
        shown: dict[str, set[str]] = {}
        for name, source in entry.get("reexports", {}).items():
            if isinstance(source, dict) and not name.startswith("_"):
                owner = short(source["from"].rpartition(".")[0])
                if owner in modules or LEFT_OUT.match(owner):
                    shown.setdefault(owner, set()).add(name)
                else:  # made inside a function
                    defines.add(name)
        if module == "utils":
            for owner in ("utils.deepspeed", "utils.megatron_lm"):
                found = {n for n in conditional if RENAMED.get(n, n) in modules[owner]["defines"]}
                shown.setdefault(owner, set()).update(
                    f"{RENAMED[n]} as {n}" if n in RENAMED else n for n in found
                )
        for name in entry.get("data") or {}:
            owner = OWNERS.get(name, "utils.constants" if name in constants else module)
            if name in NOISE or name.startswith("_"):
                continue
            if owner == module:
                defines.add(name)
            else:
                shown.setdefault(owner, set()).add(name)
        yield module, defines, {k: v for k, v in shown.items() if not LEFT_OUT.match(k)}


def main(path: str) -> None:
    """Print the table for the contract file at `path`."""
    homes = known_homes(NAMES)
    for module, defines, shown in sections(json.loads(Path(path).read_text())):
        print(f"\n[{module}]")
        for name in sorted(defines):
            print(f"{name:48} {homes.get((module, name), '-')}")
        for owner, names in sorted(shown.items()):
            text = f"from {owner}: {', '.join(sorted(names))}"
            print("\n".join(textwrap.wrap(text, 118, subsequent_indent="    ", break_on_hyphens=False)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
