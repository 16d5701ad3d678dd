"""`acc launch` with real processes: signals, exit codes, orphans, ports, and the way of starting a single process."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups and signals")
LAUNCH = [sys.executable, "-m", "acc_trainer.cli.main", "launch", "--cpu"]
LIMIT_S = 60


@pytest.fixture
def write(tmp_path):
    def script(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return script


@pytest.fixture
def start(tmp_path):
    started = []

    def launch(*words, **options):
        environ = {
            **os.environ,
            "HF_HOME": str(tmp_path / "home"),
            "OMP_NUM_THREADS": "1",
            **options.pop("env", {}),
        }
        environ.pop("LOCAL_RANK", None)
        process = subprocess.Popen(
            [*LAUNCH, *words],
            env=environ,
            **{
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                "cwd": tmp_path,
                **options,
            },
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _finish(process):
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def _alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if sys.platform == "linux":
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    return stat.rpartition(")")[2].split()[0] != "Z"


def _wait_for(condition, what):
    ends = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < ends, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.02)


def _pids_in(folder, count):
    """The process ids in files named pid_*, once there are `count` complete ones."""
    files = []

    def complete():
        files[:] = [path for path in folder.glob("pid_*") if path.read_text().endswith("\n")]
        return len(files) == count

    _wait_for(complete, f"{count} pid files")
    return [int(path.read_text()) for path in files]


SAY_PID = """
import os, signal, sys, time
rank = os.environ.get("RANK", "0")
def say(name, pid):
    with open(f"pid_{name}", "w") as file:
        file.write(f"{pid}\\n")
"""


def test_every_worker_gets_its_rank_and_the_scripts_arguments(start, write):
    script = write(
        "import os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'ACCELERATE_MIXED_PRECISION')\n"
        "os.write(1, f'{[os.environ[name] for name in names]} {sys.argv[1:]}\\n'.encode())\n"
    )
    code, out, err = _finish(
        start("--num_processes", "3", "--mixed_precision", "bf16", script, "--num_processes", "9", "-m")
    )
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"['{rank}', '{rank}', '3', '3', '127.0.0.1', 'bf16'] ['--num_processes', '9', '-m']"
        for rank in range(3)
    ]


def test_the_first_failing_workers_exit_code_comes_back_and_it_is_named(start, write):
    script = write(SAY_PID + "say(rank, os.getpid())\nif rank == '1': sys.exit(7)\ntime.sleep(600)\n")
    begun = time.monotonic()
    code, _, err = _finish(start("--num_processes", "2", script))
    assert code == 7
    assert "rank 1 (process " in err
    assert "left with exit code 7" in err
    assert time.monotonic() - begun < 30


def test_a_worker_that_ends_by_a_signal_gives_128_and_the_number(start, write):
    script = write(SAY_PID + "if rank == '0': os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(600)\n")
    code, _, err = _finish(start("--num_processes", "2", script))
    assert code == 128 + signal.SIGSEGV
    assert "rank 0" in err
    assert "SIGSEGV" in err


def test_what_a_failed_run_leaves_behind_is_ended_too(start, write, tmp_path):
    script = write(
        SAY_PID
        + "child = __import__('subprocess').Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "say(f'child_{rank}', child.pid)\n"
        "while len([n for n in os.listdir() if n.startswith('pid_')]) < 2: time.sleep(0.01)\n"
        "if rank == '1': sys.exit(3)\ntime.sleep(600)\n"
    )
    code, _, _ = _finish(start("--num_processes", "2", script))
    assert code == 3
    _wait_for(lambda: not any(map(_alive, _pids_in(tmp_path, 2))), "the workers' children to end")


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path):
    from acc_trainer.launch.supervisor import WorkerStart, supervise

    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); time.sleep(600)"
    failing = "import time; time.sleep(1.0); raise SystemExit(5)"
    starts = [
        WorkerStart(rank=rank, command=[sys.executable, "-c", code], environ=os.environ)
        for rank, code in enumerate((stubborn, failing))
    ]
    begun = time.monotonic()
    outcome = supervise(starts, grace_s=0.5)
    assert (outcome.code, outcome.rank) == (5, 1)
    assert 1.4 < time.monotonic() - begun < 20


def test_after_one_sigterm_to_the_launcher_a_worker_that_goes_on_is_killed_when_the_grace_period_is_over():
    code = (
        "import os, signal, sys\n"
        "from acc_trainer.launch.supervisor import WorkerStart, supervise\n"
        "text = ('import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); '\n"
        "        'os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)')\n"
        "outcome = supervise([WorkerStart(rank=0, command=[sys.executable, '-c', text], environ=os.environ)], grace_s=0.5)\n"
        "print(outcome.code, outcome.stopped_by.name, outcome.is_news, outcome.describe())\n"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.startswith("137 SIGTERM True rank 0 (process "), done.stderr
    assert "went on after SIGTERM and was killed" in done.stdout
    assert time.monotonic() - begun < 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_systems_without_sigtimedwait_and_spawn_in_a_session_supervise_all_the_same(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from acc_trainer.launch import supervisor\n"
        "del signal.sigtimedwait, signal.sigwaitinfo\n"
        "def spawn(*args, **kwargs): raise NotImplementedError\n"
        "os.posix_spawnp = spawn\n"
        "def start(rank, *command):\n"
        "    return supervisor.WorkerStart(rank=rank, command=command, environ=os.environ)\n"
        "def python(rank, text): return start(rank, sys.executable, '-c', text)\n"
        "sleep = 'import os, time; assert os.getsid(0) == os.getpid(); time.sleep(600)'\n"
        "one = supervisor.supervise([python(0, sleep), python(1, 'raise SystemExit(4)')], grace_s=5)\n"
        "print(one.code, one.rank)\n"
        "tell = 'import os, signal; os.kill(os.getppid(), signal.SIGTERM); import time; time.sleep(600)'\n"
        "two = supervisor.supervise([python(0, sleep), python(1, tell)], grace_s=5)\n"
        "print(two.code, two.stopped_by.name)\n"
        "try:\n    supervisor.supervise([start(0, 'no-such-program')])\n"
        "except FileNotFoundError as error:\n    print(error.filename)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.stderr) == ("4 1\n143 SIGTERM\nno-such-program\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_control_z_stops_the_workers_with_the_launcher_and_fg_continues_them(start, write, tmp_path):
    script = write(SAY_PID + "say(rank, os.getpid())\nwhile not os.path.exists('go'): time.sleep(0.01)\n")
    process = start("--num_processes", "2", script)
    pids = [*_pids_in(tmp_path, 2), process.pid]
    process.send_signal(signal.SIGTSTP)
    _wait_for(lambda: all(_state(pid) == "T" for pid in pids), "launcher and workers to stop")
    (tmp_path / "go").write_text("")
    process.send_signal(signal.SIGCONT)
    assert _finish(process) == (0, "", "")


def _state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_to_the_launcher_reaches_every_worker_once(start, write, tmp_path, number, count):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and so by all that is started")
    script = write(
        SAY_PID
        + f"got = []\nsignal.signal({int(number)}, lambda n, f: got.append(n))\nsay(rank, os.getpid())\n"
        "while not got: time.sleep(0.01)\n"
        "time.sleep(0.2)\nos.write(1, f'rank {rank} got {len(got)}\\n'.encode())\n"
    )
    process = start("--num_processes", str(count), script)
    _pids_in(tmp_path, count)
    process.send_signal(number)
    code, out, err = _finish(process)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"rank {rank} got 1" for rank in range(count)]


def test_a_worker_that_dies_of_the_signal_gives_its_number_without_blame(start, write, tmp_path):
    process = start("--num_processes", "2", write(SAY_PID + "say(rank, os.getpid())\ntime.sleep(600)\n"))
    _pids_in(tmp_path, 2)
    process.terminate()
    code, _, err = _finish(process)
    assert (code, err) == (128 + signal.SIGTERM, "")


def test_a_second_interrupt_kills(start, write, tmp_path):
    script = write(
        SAY_PID + "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsay(rank, os.getpid())\ntime.sleep(600)\n"
    )
    process = start("--num_processes", "2", script)
    pids = _pids_in(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, _ = _finish(process)
    assert code == 128 + signal.SIGKILL
    assert not any(map(_alive, pids))


def test_a_killed_launcher_leaves_no_orphan(start, write, tmp_path):
    script = write(
        SAY_PID
        + "child = __import__('subprocess').Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "say(f'child_{rank}', child.pid)\nsay(rank, os.getpid())\ntime.sleep(600)\n"
    )
    process = start("--num_processes", "2", script)
    pids = _pids_in(tmp_path, 4)
    process.kill()
    _wait_for(lambda: not any(map(_alive, pids)), "workers and their children to end")
    _finish(process)  # nobody holds the pipes of the output any more


def test_one_process_becomes_the_script(start, write, tmp_path):
    script = write(
        SAY_PID
        + "say(rank, os.getpid())\nprint(sorted(n for n in os.environ if n == 'RANK'), flush=True)\nsys.exit(7)\n"
    )
    process = start("--num_processes", "1", script)
    code, out, err = _finish(process)
    assert (code, out, err) == (7, "[]\n", "")
    assert _pids_in(tmp_path, 1) == [process.pid]


def test_only_rank_0_reads_the_terminals_input(start, write):
    script = write(
        "import os, sys\ntext = sys.stdin.read()\nos.write(1, f\"{os.environ['RANK']} {text!r}\\n\".encode())\n"
    )
    process = start("--num_processes", "2", script, stdin=subprocess.PIPE)
    out, _ = process.communicate("typed", timeout=LIMIT_S)
    assert sorted(out.splitlines()) == ["0 'typed'", "1 ''"]


def test_control_c_in_a_terminal_interrupts_each_worker_once(start, write, tmp_path):
    script = write(
        SAY_PID
        + "got = []\nsignal.signal(signal.SIGINT, lambda n, f: got.append(n))\nsay(rank, os.getpid())\n"
        "while not got: time.sleep(0.01)\ntime.sleep(0.3)\n"
        "open(f'got_{rank}', 'w').write(str(len(got)))\n"
    )
    main_side, worker_side = pty.openpty()
    process = start(
        *("--num_processes", "2", script),
        stdin=worker_side,
        stdout=worker_side,
        stderr=worker_side,
        text=False,
        preexec_fn=_take_terminal,
    )
    os.close(worker_side)
    _pids_in(tmp_path, 2)
    os.write(main_side, b"\x03")
    assert process.wait(timeout=LIMIT_S) == 0
    os.close(main_side)
    assert [(tmp_path / f"got_{rank}").read_text() for rank in range(2)] == ["1", "1"]


def _take_terminal():
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_script_that_joins_a_process_group_itself_finds_it_at_the_held_port(start, write):
    script = write(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "value = torch.ones(1) * dist.get_rank()\ndist.all_reduce(value)\n"
        "__import__('os').write(1, f'sum {value.item()}\\n'.encode())\ndist.destroy_process_group()\n"
    )
    code, out, _ = _finish(start("--num_processes", "2", script))
    assert code == 0
    assert out.splitlines() == ["sum 1.0", "sum 1.0"]


def test_a_program_that_is_not_python_runs_and_a_module_too(start, write):
    write("import os\nos.write(1, b'module here\\n')\n")
    code, out, err = _finish(start("--num_processes", "2", "--no_python", "echo", "hello"))
    assert (code, out) == (0, "hello\nhello\n"), err
    code, out, err = _finish(start("--num_processes", "2", "-m", "script"))
    assert (code, out) == (0, "module here\nmodule here\n"), err


def test_restarts_go_to_torch_distributed_run_and_work(start, write, tmp_path):
    script = write(
        "import os, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1': sys.exit(3)\n"
        "open('done_' + os.environ['RANK'], 'w').write(os.environ['ACCELERATE_USE_CPU'])\n"
    )
    code, _, err = _finish(start("--num_processes", "2", "--max_restarts", "1", script))
    assert code == 0, err
    assert [(tmp_path / f"done_{rank}").read_text() for rank in range(2)] == ["true", "true"]


def test_a_launcher_inside_a_worker_starts_its_own_world(start, write, tmp_path):
    inner = tmp_path / "inner.py"
    inner.write_text("import os\nprint(os.environ.get('RANK'), os.environ.get('WORLD_SIZE'), flush=True)\n")
    script = write(
        "import os, subprocess, sys\n"
        f"if os.environ['RANK'] == '1': sys.exit(subprocess.run({[*LAUNCH, '--num_processes', '1', str(inner)]}).returncode)\n"
    )
    code, out, _ = _finish(start("--num_processes", "2", script))
    assert (code, out) == (0, "None None\n")
