"""hypothesis among ranks: rank 0 draws, every rank runs the example, and what fails on any of them is made small and shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from acc_ops.testing import use_test_profile
from acc_ops.world import current_world

Example = TypeVar("Example")


def check_on_every_rank(
    check: Callable[[Example], None], examples: SearchStrategy[Example], *, number: int, shrinking: int = 12
) -> None:
    """Run `check` with `number` examples, each at the same time on all ranks of the current world; every rank calls it, with the same arguments.

    An AssertionError, which a check raises when its run is over, fails the example. Then at most `shrinking` smaller ones are tried, and rank 0 raises
    for the smallest, which its message names. Anything else that is raised ends the rank at once, and it sends nothing any more, as the others may
    be anywhere.
    """
    comm = current_world().comm
    if comm.rank:
        while (sent := comm.broadcast_object(None)) is not None:
            comm.all_gather_object(_outcome(check, sent[0]))
        return
    use_test_profile()
    known: dict[str, list[str | None]] = {}  # so that an example which is tried again ends in the same way
    failed: list[str] = []

    @settings(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(examples)
    def drawn(example: Example) -> None:
        name = repr(example)
        if name not in known and len(failed) <= shrinking:
            try:
                comm.broadcast_object((example,))
                known[name] = comm.all_gather_object(_outcome(check, example))
            except BaseException as error:
                raise _Ended(error) from error
            if failed or any(known[name]):
                failed.append(name)
        wrong = {rank: text for rank, text in enumerate(known.get(name, ())) if text is not None}
        assert not wrong, f"with {name}, on rank " + "; on rank ".join(f"{r}: {t}" for r, t in wrong.items())

    try:
        drawn()
    except _Ended as ended:
        raise ended.error from ended.error.__cause__
    except BaseException:
        comm.broadcast_object(None)
        raise
    comm.broadcast_object(None)


class _Ended(BaseException):
    """Why rank 0 cannot go on. hypothesis would catch an Exception, and run the example again."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def drawn(examples: SearchStrategy[Example], number: int) -> list[Example]:
    """Different examples, the simplest first, for what must be known before processes start."""
    use_test_profile()
    found: list[Example] = []

    @settings(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(examples)
    def note(example: Example) -> None:
        found.append(example)

    note()
    return found


def _outcome(check: Callable[[Example], None], example: Example) -> str | None:
    try:
        check(example)
    except AssertionError as error:
        return str(error) or "an assertion failed"
    except Exception as error:
        raise RuntimeError(f"with {example!r}: {error}") from error
    return None
