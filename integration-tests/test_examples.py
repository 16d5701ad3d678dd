"""Every example learns what it says: the figures it prints are held against bounds that a loop with a mistake misses."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("sklearn")


@pytest.fixture
def said(root, tmp_path):
    """What an example prints, on any number of processes."""

    def run(name, *args, processes=1):
        launch = ["-m", "acc_trainer.cli.main", "launch", "--cpu", "--num_processes", str(processes)]
        done = subprocess.run(
            [sys.executable, *launch, str(root / "docs" / "examples" / name), *args],
            env={
                **os.environ,
                "ACCELERATE_USE_CPU": "true",
                "HF_HOME": str(tmp_path),
                "OMP_NUM_THREADS": "1",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def numbers(text):
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)]


def test_the_index_names_every_example(root):
    folder = root / "docs" / "examples"
    assert set(re.findall(r"\((\w+\.py)\)", (folder / "README.md").read_text())) == {
        path.name for path in folder.glob("*.py")
    }


def test_the_classifier_reads_digits(said):
    lines = said("train_digits.py", "--epochs", "4").splitlines()
    assert numbers(lines[-1])[1] > 0.9


def test_the_language_model_knows_more_than_frequencies(said):
    bits, unigram = numbers(said("language_model.py"))
    assert bits < unigram - 1


def test_the_generator_finds_the_whole_ring(said):
    off, covered, _ = numbers(said("gan.py"))
    assert off < 0.1
    assert covered >= 14


def test_metrics_are_the_same_on_one_process_and_on_two(said):
    alone, together = said("evaluate.py"), said("evaluate.py", processes=2)
    assert alone == together
    samples, accuracy, f1, wrong, _ = numbers(alone.replace("F1", ""))
    assert samples == 797
    assert accuracy == pytest.approx(1 - wrong / samples, abs=1e-6)
    assert 0.85 < f1 < 1


def test_the_last_process_stops_all_of_them_at_the_same_epoch(said):
    *stopped, loss, noise = numbers(said("early_stopping.py", processes=2))
    assert len(stopped) == 2
    assert stopped[0] == stopped[1] < 200
    assert loss < 1.2 * noise


def test_local_sgd_ends_with_one_model_that_learnt(said):
    accuracy, images, processes, apart = numbers(said("local_sgd.py", processes=2))
    assert (images, processes, apart) == (397, 2, 0)
    assert accuracy > 0.85


def test_runs_in_one_process_take_nothing_over(said):
    first, second = said("cross_validation.py").splitlines()
    accuracy, seen, *folds = numbers(first)
    again, in_bf16 = numbers(second.replace("bf16", ""))
    assert seen == 1797
    assert accuracy == pytest.approx(sum(folds) / seen, abs=1e-4)
    assert accuracy > 0.93
    assert again == folds[0]
    assert in_bf16 == pytest.approx(folds[0], abs=10)


def test_a_model_runs_within_a_fraction_of_its_memory(said, tmp_path):
    lines = said("run_larger_than_memory.py").splitlines()
    cpu, disk = (next(line for line in lines if line.startswith(device)) for device in ("cpu", "disk"))
    assert numbers(cpu)[0] <= numbers(cpu)[1] == 100
    assert numbers(disk)[0] > 300
    assert (tmp_path / "placement.svg").read_text().startswith("<svg")
    size, grown, apart = (float(number) for number in re.findall(r"\d+(?:\.\d+)?|nan", lines[-1]))
    assert apart == 0
    assert not grown >= 0.2 * size  # not a number where the system does not say
