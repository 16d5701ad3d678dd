"""How a test builds one option class from each of the layers that may hold its values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from acc_ops.options import add_flags, from_env, options_of, resolve, sources


def _build(cls: type, wanted: Mapping[str, tuple[str, Any]], layer: str) -> Any:
    spelled = {option.name: option for option in options_of(cls)}
    if layer == "environment":
        return from_env(cls, {spelled[name].env or "": text for name, (text, _) in wanted.items()})
    if layer == "flag":
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_flags(parser, cls)
        words = [f"--{spelled[name].flag}={text}" for name, (text, _) in wanted.items()]
        return resolve(cls, given=parser.parse_args(words))
    if layer == "file":
        return resolve(cls, file={spelled[name].key or "": text for name, (text, _) in wanted.items()})
    return cls(**{name: value for name, (_, value) in wanted.items()})


@pytest.fixture(params=["argument", "environment", "flag", "file"])
def from_layer(request: pytest.FixtureRequest) -> Callable[[type, Mapping[str, tuple[str, Any]]], Any]:
    """Builds `cls` with the `wanted` values (field -> text, value), all from one layer; each must arrive, and `sources` must tell the layer."""

    def build(cls: type, wanted: Mapping[str, tuple[str, Any]]) -> Any:
        spelled = {option.name: option for option in options_of(cls)}
        where = {"environment": "env", "flag": "flag", "file": "key"}.get(request.param)
        wanted = {
            name: pair for name, pair in wanted.items() if where is None or getattr(spelled[name], where)
        }
        made = _build(cls, wanted, request.param)
        for name, (_, value) in wanted.items():
            assert getattr(made, name) == value, name
            assert sources(made)[name] == ("argument" if request.param == "flag" else request.param), name
        return made

    return build
