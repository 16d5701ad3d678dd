"""One piece of a checkpoint as a rank would write it: what is in it and how it is written are apart, so that a copy can be written later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import clear_frames
from typing import Any, ClassVar

from torch import Tensor

import acc_bigmodel
from acc_ops.lazy import LazyModule

save = LazyModule(
    "acc_bigmodel.save"
)  # as with acc_bigmodel's top: what writes files is loaded when it is first used


@dataclass(frozen=True, kw_only=True)
class Part:
    """The values `state` under the stem `name`. `dataclasses.replace(part, state=copies)` writes the same files from other memory."""

    name: str
    state: Any
    together: ClassVar[bool] = (
        False  # whether all ranks have a part of that name and must write it at the same time
    )

    def write(self, folder: str | Path, group: Any = None) -> list[str]:
        """Write it into `folder`; the names of the files, relative to it.

        Ranks that write `together` speak through the process group `group` (None: the default one), so that a thread beside the training can write.
        """
        raise NotImplementedError


def for_each(parts: Iterable[Part], work: Callable[[Part], Any]) -> None:
    """`work` on one part after the other. What it raises is raised at the end, since ranks gather the next parts together, and none may be missing there.

    After that only those are worked on that all ranks write `together`.
    """
    failed: Exception | None = None
    for part in parts:
        try:
            if failed is None or part.together:
                work(part)
        except Exception as error:  # noqa: BLE001 - raised below
            clear_frames(error.__traceback__)  # which hold the state of this part
            failed = failed or error
        del part  # before the next one is gathered
    if failed is not None:
        raise failed


@dataclass(frozen=True, kw_only=True)
class WeightsPart(Part):
    """Whole weights as `<name>.safetensors`, or with `safe=False` as torch file `pytorch_<name>.bin`."""

    state: Mapping[str, Tensor]
    safe: bool = True

    def write(self, folder: str | Path, group: Any = None) -> list[str]:  # noqa: ARG002  one rank writes it
        return acc_bigmodel.save_weights(self.state, folder, self.name, safe=self.safe)


@dataclass(frozen=True, kw_only=True)
class TorchFilePart(Part):
    """Anything that torch.save takes, as `<name><suffix>`. Raises the OSError of a file that cannot be written, which torch.save hides."""

    suffix: str = ".bin"

    def write(self, folder: str | Path, group: Any = None) -> list[str]:  # noqa: ARG002
        file = f"{self.name}{self.suffix}"
        save.write_torch_file(Path(folder, file), self.state)
        return [file]
