"""A DeepSpeed configuration: read from where it may stand, asked by dotted keys, and its "auto" values filled in.

[Note: three kinds of value] a key of the configuration is absent (DeepSpeed's default), "auto" (to be filled in from this run), or said. What
is said is never overwritten; another value for it is a mismatch. Imports neither DeepSpeed nor torch.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Mapping
from typing import Any

from acc_ops.options import OptionError

AUTO = "auto"


class HfDeepSpeedConfig:
    """A configuration by dotted keys: `get_value("zero_optimization.stage")`.

    Takes a dictionary (copied), the path of a JSON file, JSON text or that text in base64. Raises OptionError (a ValueError) for anything else.
    """

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)
        self.path: str | None = None  # where it was read, if in a file
        if not isinstance(config_file_or_dict, Mapping) and os.path.isfile(config_file_or_dict):
            self.path = os.fspath(config_file_or_dict)
        self.made_of_options = False  # as DeepSpeedPlugin makes one from its other fields
        self.set_stage_and_offload()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HfDeepSpeedConfig) and self.config == other.config

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    def set_stage_and_offload(self) -> None:
        """Look again which ZeRO stage (-1 for none) and which offloading the configuration asks for: after it was changed."""
        stage = self.get_value("zero_optimization.stage", -1)
        self._stage = stage if stage != AUTO else -1
        devices = (
            self.get_value(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")
        )
        self._offload = any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The dictionary that holds the last part of a dotted key, None where there is none, and that part."""
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key, `default` where it is absent."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Write the value of a dotted key, with the dictionaries on the way to it."""
        *path, last = ds_key_long.split(".")
        node = self.config
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key with everything under it. Raises OptionError with `must_exist` where it is absent."""
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise OptionError(f"the DeepSpeed configuration has no {ds_key_long!r}: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the key is there and its value counts as true."""
        value = self.get_value(ds_key_long)
        return value is not None and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the key is there and its value counts as false; an absent one is neither."""
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value is to be filled in."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_zero2(self) -> bool:
        """Whether gradients are sharded and parameters are not."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are sharded."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether something is kept in CPU memory or on an NVMe disk."""
        return self._offload

    def fill(
        self, ds_key_long: str, given: Mapping[str, Any], mismatches: list[str], *, must_match: bool = True
    ) -> bool:
        """Put `given[ds_key_long]` where the configuration says "auto", and tell whether it was put there.

        A value that is said and differs goes to `mismatches`, with `must_match`. Raises OptionError for an "auto" that `given` does not answer,
        with `must_match`.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is None or node.get(key) is None:
            return False
        wanted = given.get(ds_key_long)
        if node[key] == AUTO:
            if ds_key_long in given:
                node[key] = wanted
            elif must_match:
                raise OptionError(
                    f'the DeepSpeed configuration says "auto" for {ds_key_long}, and nothing here tells its value: write it into the '
                    f"configuration, or hand it over by that name"
                )
            return ds_key_long in given
        if must_match and wanted is not None and wanted != node[key]:
            mismatches.append(
                f"{ds_key_long} is {node[key]!r} in the DeepSpeed configuration, {wanted!r} here"
            )
        return False


def refuse(mismatches: list[str]) -> None:
    """Raise OptionError listing what differs, if anything does."""
    if mismatches:
        raise OptionError(
            'two values for one thing; leave one out, or write "auto" into the configuration:\n  '
            + "\n  ".join(mismatches)
        )


def _read(source: Any) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, os.PathLike)):
        raise OptionError(
            f"a DeepSpeed configuration is a dictionary, the path of a JSON file, JSON text or base64, got {source!r}"
        )
    where, text = "", str(os.fspath(source))
    if os.path.isfile(text):
        where = f" in {text}"
        with open(text, encoding="utf-8") as file:
            text = file.read()
    elif not text.lstrip().startswith("{"):
        text = _decoded(text)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"the DeepSpeed configuration{where} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise OptionError(
            f"the DeepSpeed configuration{where} must be a JSON object, got {type(found).__name__}"
        )
    return found


def _decoded(text: str) -> str:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise OptionError(
            f"{text!r} is neither an existing file with a DeepSpeed configuration, nor JSON text, nor base64 of it"
        ) from None
