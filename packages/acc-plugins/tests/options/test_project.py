"""ProjectConfiguration."""

from __future__ import annotations

from pathlib import Path

from acc_plugins.options.project import CheckpointPolicy, ProjectConfiguration


def test_the_logging_folder_follows_the_project_folder() -> None:
    assert ProjectConfiguration(Path("here")).logging_dir == "here"
    assert ProjectConfiguration("here", "logs").logging_dir == "logs"


def test_set_directories_keeps_a_logging_folder_that_was_set() -> None:
    configuration = ProjectConfiguration()
    configuration.set_directories(Path("first"))
    assert (configuration.project_dir, configuration.logging_dir) == ("first", "first")
    configuration.set_directories("second")
    assert (configuration.project_dir, configuration.logging_dir) == ("second", "first")


def test_a_policy_for_checkpoints_is_kept_as_it_was_given() -> None:
    policy = CheckpointPolicy(last=2, every=10, best=1, mode="max")
    configuration = ProjectConfiguration("here", automatic_checkpoint_naming=True, keep=policy)
    assert configuration.keep is policy
    assert (CheckpointPolicy().last, CheckpointPolicy().best, CheckpointPolicy().every) == (1, 0, None)
