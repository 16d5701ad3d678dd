"""How torch.compile is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from acc_ops.enums import DynamoBackend
from acc_ops.handlers import KwargsHandler
from acc_ops.options import OptionError, fill_from_env, option
from acc_plugins.options.checks import settle


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments for `torch.compile`; those left None come from the environment, then from the default named in their help.

    Raises OptionError (a ValueError) for an unknown backend or mode, and for a mode together with options.
    """

    backend: DynamoBackend | None = option(
        None,
        env="ACCELERATE_DYNAMO_BACKEND",
        flag="dynamo_backend",
        key="dynamo_backend",
        help="backend of torch.compile; 'no' (the default) does not compile",
    )
    mode: str | None = option(
        None,
        env="ACCELERATE_DYNAMO_MODE",
        flag="dynamo_mode",
        key="dynamo_mode",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        help="what to optimise for; default: 'default'",
    )
    fullgraph: bool | None = option(
        None,
        env="ACCELERATE_DYNAMO_USE_FULLGRAPH",
        flag="dynamo_use_fullgraph",
        key="dynamo_use_fullgraph",
        help="raise where the graph would break; default: false",
    )
    dynamic: bool | None = option(
        None,
        env="ACCELERATE_DYNAMO_USE_DYNAMIC",
        flag="dynamo_use_dynamic",
        key="dynamo_use_dynamic",
        help="compile for shapes that change; default: torch finds out",
    )
    options: Any = option(None, flag=False, help="options of the backend, as a dictionary")
    disable: bool = option(False, flag=False, help="make torch.compile do nothing")
    use_regional_compilation: bool | None = option(
        None,
        env="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        flag="dynamo_use_regional_compilation",
        key="dynamo_use_regional_compilation",
        help="compile a block that repeats once, instead of the whole model; default: false",
    )

    def __post_init__(self) -> None:
        fill_from_env(self)
        settle(self)
        if self.options is not None and self.mode not in (None, "default"):
            raise OptionError(
                f"TorchDynamoPlugin takes mode={self.mode!r} or options={self.options!r}, not both: a mode is a set of options"
            )
        self.backend = DynamoBackend.NO if self.backend is None else self.backend
        self.mode = "default" if self.mode is None else self.mode
        self.fullgraph = bool(self.fullgraph)
        self.use_regional_compilation = bool(self.use_regional_compilation)

    def to_dict(self) -> dict[str, Any]:
        """Every field; the backend as torch spells it."""
        assert self.backend is not None
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """What to hand to `torch.compile`: the fields that differ from the defaults."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        if self.backend is DynamoBackend.NO:
            kwargs.pop("backend", None)
        if self.options is not None:
            kwargs.pop("mode", None)
        return kwargs
