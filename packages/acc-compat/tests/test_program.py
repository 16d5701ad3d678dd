"""Tests of `python -m acc_compat`: a program sees what `python` would show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPORT = """
import json, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path,
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": __spec__ and [__spec__.name, __spec__.origin],
    "loader": type(__loader__).__name__,
    "doc": __doc__,
    "main": main.__dict__ is globals(),
    "names": sorted(set(globals()) - {"json", "sys", "main"}),
}))
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """One folder with the same program in every form."""
    (tmp_path / "script.py").write_text(REPORT)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "script.py").symlink_to(tmp_path / "script.py")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(REPORT)
    with zipfile.ZipFile(tmp_path / "file.zip", "w") as file:
        file.writestr("__main__.py", REPORT)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("import sys; seen = list(sys.argv)\n")
    (tmp_path / "pack" / "__main__.py").write_text(REPORT)
    (tmp_path / "pack" / "part.py").write_text(REPORT)
    return tmp_path


FORMS = [
    ["script.py"],
    ["./link/script.py"],
    ["folder"],
    ["file.zip"],
    ["-m", "script"],
    ["-m", "pack"],
    ["-m", "pack.part"],
]


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
@pytest.mark.parametrize("flags", [[], ["-P"], ["-I"]], ids=lambda flags: "".join(flags) or "plain")
def test_a_program_sees_what_python_shows_it(
    python, programs: Path, form: list[str], flags: list[str]
) -> None:
    if "-P" in flags and sys.version_info < (3, 11):
        pytest.skip("no -P before 3.11")
    plain = python(*flags, *form, "a", "--force", "-m", cwd=programs)
    ours = python(*flags, "-m", "acc_compat", *form, "a", "--force", "-m", cwd=programs)
    if plain.returncode:  # a module that is not on the path of -I
        assert ours.returncode == plain.returncode
        return
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert ours.stderr == ""


def test_an_absolute_path_is_shown_as_given(python, programs: Path) -> None:
    script = str(programs / "script.py")
    assert python("-m", "acc_compat", script).stdout == python(script).stdout


@pytest.mark.parametrize(
    "body",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a text')",
        "raise ValueError('wrong')",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "raise KeyboardInterrupt",
        "def broken(:",
        "pass",
    ],
)
def test_the_exit_code_is_the_programs(python, tmp_path: Path, body: str) -> None:
    (tmp_path / "script.py").write_text(body)
    plain, ours = python("script.py"), python("-m", "acc_compat", "script.py")
    assert ours.returncode == plain.returncode
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_a_program_means_acc_when_it_says_accelerate(python, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import accelerate, acc_compat.api\nprint(accelerate is acc_compat.api)\n"
    )
    assert python("-m", "acc_compat", "script.py").stdout == "True\n"
    assert python("script.py").returncode == 1


def test_children_of_a_program_mean_acc_too(python, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import accelerate; print(accelerate.__version__)'], check=True)\n"
    )
    assert python("-m", "acc_compat", "script.py").stdout == "1.15.0\n"


def test_spawned_workers_find_the_programs_functions(python, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing\n"
        "import accelerate\n"
        "def work(number):\n    return number + 1, accelerate.__version__\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [1]))\n"
    )
    for form in (["script.py"], ["-m", "script"]):
        run = python("-m", "acc_compat", *form)
        assert run.stdout == "[(2, '1.15.0')]\n", run.stderr


def test_main_lives_on_for_threads_and_exit_handlers(python, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import atexit, pickle, sys, threading, time\n"
        "class Thing: pass\n"
        "def late():\n    time.sleep(0.2); print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, __name__)\n"
        "threading.Thread(target=late).start()\n"
        "atexit.register(lambda: print(sys.modules['__main__'].Thing is Thing))\n"
    )
    assert python("-m", "acc_compat", "script.py").stdout == "True __main__\nTrue\n"


@pytest.mark.parametrize(
    "form", [["nothing.py"], ["-m", "nothing"], ["-m", "nothing.at.all"], ["empty"]], ids=" ".join
)
def test_a_program_that_is_not_there_is_told_as_python_tells_it(
    python, tmp_path: Path, form: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    plain, ours = python(*form), python("-m", "acc_compat", *form)
    assert ours.returncode == plain.returncode
    assert ours.stderr.partition(": ")[2].split("(")[0] == plain.stderr.partition(": ")[2].split("(")[0]
    assert "Traceback" not in ours.stderr


def test_no_program_and_unknown_options_show_the_usage(python) -> None:
    for arguments in ([], ["--forced", "script.py"], ["-m"]):
        run = python("-m", "acc_compat", *arguments)
        assert run.returncode == 2
        assert "python -m acc_compat [--force]" in run.stderr
    run = python("-m", "acc_compat", "--help")
    assert run.returncode == 0
    assert "python -m acc_compat [--force]" in run.stdout


def test_an_installed_accelerate_is_replaced_only_when_forced(python, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "accelerate.py").write_text("__version__ = 'another'\n")
    (tmp_path / "script.py").write_text(
        "import accelerate, os, subprocess, sys\nprint(accelerate.__version__, flush=True)\n"
        "if len(sys.argv) == 1: subprocess.run([sys.executable, 'script.py', 'child'], check=True)\n"
    )
    place = str(tmp_path / "site")
    run = python("-m", "acc_compat", "script.py", PYTHONPATH=place)
    assert run.returncode == 2
    assert "acc_compat: accelerate is here already" in run.stderr
    run = python("-m", "acc_compat", "--force", "script.py", PYTHONPATH=place)
    assert run.stdout == "1.15.0\n1.15.0\n", run.stderr


@pytest.mark.parametrize("module", ["acc_compat.api.commands.launch", "accelerate.commands.launch"])
def test_the_launch_command_is_found_under_its_module_name(module: str) -> None:
    arguments = [sys.executable, "-m", module, "--help"]
    run = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "ACC_COMPAT": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert "--num_processes" in run.stdout


def test_the_launch_command_can_be_the_program(python) -> None:
    run = python("-m", "acc_compat", "-m", "accelerate.commands.launch", "--help")
    assert run.returncode == 0, run.stderr
    assert "--num_processes" in run.stdout
