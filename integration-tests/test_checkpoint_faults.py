"""A save that dies, fails, or loses its power at any of its file operations leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import file_steps
import pytest

pytestmark = pytest.mark.skipif(file_steps.why_not() is not None, reason=str(file_steps.why_not()))
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return file_steps.build(tmp_path_factory.mktemp("library"))


def _environ(library):
    return {**os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library)}


@pytest.fixture(scope="module")
def order(library, tmp_path_factory):
    """Sends an order to a process that is ready to save (fault_runs.py), and gives its answer."""
    said = tmp_path_factory.mktemp("orders") / "stderr"
    with (
        open(said, "w") as errors,
        subprocess.Popen(
            [sys.executable, str(HERE / "fault_runs.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environ(library),
        ) as process,
    ):

        def ask(what, way, **more):
            process.stdin.write(json.dumps({"what": what, "way": way, **more}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, said.read_text()
            return json.loads(line)

        yield ask
        process.stdin.close()


def _judge(answer, what, capsys):
    bad = answer.pop("bad")
    with capsys.disabled():
        counts = ", ".join(f"{number} {name}" for name, number in answer.items())
        print(f"\n  {what}: {counts}, {len(bad)} bad", end="", flush=True)
    assert not bad, "\n".join(bad)
    assert answer["steps"] > 0


WAYS = {
    "over one name": {},
    "over one name without an exchange": {"exchange": False},
    "after a death between its two renames": {"exchange": False, "died_at": 1},
    "after a death behind its two renames": {"exchange": False, "died_at": 2},
    "automatic names, one stays": {"named": False},
    "the first of all": {"named": False, "first": True},
    "beside the training": {"background": True},
    "two ranks, automatic names": {"named": False, "ranks": 2},
    "two ranks with shards, automatic names": {"named": False, "ranks": 2, "sharded": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_death_before_any_file_operation_leaves_the_old_or_the_new_checkpoint_and_saving_goes_on(
    order, way, capsys
):
    answer = order("deaths", WAYS[way])
    _judge(answer, f"deaths, {way}", capsys)
    if "died_at" not in WAYS[way]:
        assert answer["deaths"] == answer["steps"] > 40, "the trace is too short to be that of a save"
        assert answer["old"] > 0
        assert answer["new"] > 0


def test_a_save_that_deletes_the_old_checkpoint_first_is_found_out(order):
    answer = order("deaths", {"careless": True})
    assert answer["lost"] > 5
    assert len(answer["bad"]) >= answer["lost"]
    assert all("found {None}" in said for said in answer["bad"] if "there had been" in said)


@pytest.mark.parametrize("way", [way for way in WAYS if "ranks" not in WAYS[way]])
def test_a_power_loss_after_any_file_operation_leaves_the_old_or_the_new_checkpoint(order, way, capsys):
    answer = order("power", WAYS[way], draws=4)
    _judge(answer, f"power losses, {way}", capsys)
    assert answer["old"] > 0
    assert answer["new"] > 0


ERRORS = {
    errno.ENOSPC: ("open", "write", "sync", "rename", "mkdir", "link"),
    errno.EIO: ("open", "write", "sync", "rename", "mkdir", "link", "unlink", "rmdir"),
    errno.EACCES: ("open", "rename", "mkdir", "link", "unlink", "rmdir"),
}
EACH_STEP_ONCE = {
    errno.ENOSPC: ("open", "write", "mkdir", "link"),
    errno.EIO: ("sync", "unlink", "rmdir"),
    errno.EACCES: ("rename",),
}


@pytest.mark.parametrize(
    ("way", "kinds"),
    [
        ("over one name", ERRORS),
        ("over one name without an exchange", {errno.EIO: ("rename",), errno.EACCES: ("rename",)}),
        ("automatic names, one stays", ERRORS),
        ("the first of all", ERRORS),
        ("beside the training", ERRORS),
        ("two ranks, automatic names", ERRORS),
        ("two ranks with shards, automatic names", EACH_STEP_ONCE),
    ],
)
def test_an_error_of_any_file_operation_names_the_folder_and_the_next_save_works(order, way, kinds, capsys):
    answer = order("errors", WAYS[way], kinds=kinds)
    _judge(answer, f"{', '.join(errno.errorcode[number] for number in kinds)}, {way}", capsys)
    assert answer["raised"] > answer["steps"] / 2


MOVES = """
import os, sys
sys.path.insert(0, sys.argv[1])
from file_steps import watching
with watching(sys.argv[2], die_at=int(sys.argv[3])):
    os.chdir(sys.argv[2])
    os.mkdir("folder")
    with open("folder/old", "w") as file:
        file.write("text")
    os.rename("folder/old", "folder/new")
"""
LEFT = [{}, {"folder": None}, {"folder": None, "folder/old": ""}, {"folder": None, "folder/old": "text"}]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_process_is_killed_before_the_very_step_that_was_named(library, tmp_path, number):
    command = [sys.executable, "-c", MOVES, str(HERE), str(tmp_path), str(number)]
    ran = subprocess.run(command, capture_output=True, text=True, env=_environ(library), timeout=60)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert {
        path.relative_to(tmp_path).as_posix(): path.read_text() if path.is_file() else None
        for path in tmp_path.rglob("*")
    } == LEFT[number - 1]


TRACED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from file_steps import watching
from marked_run import MarkedRun
folder = Path(sys.argv[2])
for named in (True, False):
    run = MarkedRun(folder, named=named)
    run.save()
    (folder / "begin").mkdir()
    with watching(folder, folder.with_name("log")):
        run.save()
    (folder / "begin").rmdir()
"""
_CALLS = {
    "open": "open|openat|creat",
    "write": "write|pwrite64|writev|pwritev|pwritev2|sendfile|copy_file_range|fallocate",
    "sync": "fsync|fdatasync",
    "rename": "rename|renameat|renameat2",
    "unlink": "unlink",
    "mkdir": "mkdir|mkdirat",
    "rmdir": "rmdir",
    "truncate": "truncate|ftruncate",
    "link": "link|linkat",
}


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_what_the_kernel_sees_of_a_save_is_what_was_traced(library, tmp_path):
    (tmp_path / "run").mkdir()
    calls = ",".join(_CALLS.values()).replace("|", ",") + ",unlinkat,symlink,symlinkat,mknod,mknodat,linkat"
    command = ["strace", "-f", "-qq", "-y", "-o", str(tmp_path / "kernel"), "-e", f"trace={calls}"]
    command += [sys.executable, "-c", TRACED, str(HERE), str(tmp_path / "run")]
    ran = subprocess.run(command, capture_output=True, text=True, env=_environ(library), timeout=200)
    if "ptrace" in ran.stderr or "Operation not permitted" in ran.stderr:
        pytest.skip(f"strace may not look: {ran.stderr[:100]}")
    assert ran.returncode == 0, ran.stderr
    seen, watching = [], False
    for line in (tmp_path / "kernel").read_text().splitlines():
        if f"{tmp_path}/run/begin" in line:
            watching = not watching
        elif watching and f"{tmp_path}/run" in line and f"{tmp_path}/log" not in line:
            seen += _kind_of(line)
    traced = [step.kind for step in file_steps.read(tmp_path / "log")]
    assert traced == seen
    assert len(traced) > 100


def _kind_of(line):
    """The kind of step in a line of strace; none for a file that is only read."""
    call = re.match(r"\d+ +(\w+)\(", line).group(1)
    if call == "unlinkat":
        return ["rmdir" if "AT_REMOVEDIR" in line else "unlink"]
    kind = next(kind for kind, names in _CALLS.items() if call in names.split("|"))
    changes = kind != "open" or "O_WRONLY" in line or "O_RDWR" in line or "O_CREAT" in line
    return [kind] if changes else []
