"""The newest checkpoint is never pruned, whole ones outlive half ones, and the numbering goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from acc_trainer.checkpoint.rotate import next_number, numbers_in, prune, to_remove


@given(st.data())
def test_at_most_the_limit_stays_and_the_best_of_them(data):
    numbers = sorted(data.draw(st.sets(st.integers(0, 30), min_size=1)))
    newest = numbers[-1]
    whole = data.draw(st.sets(st.sampled_from(numbers))) | {newest}
    limit = data.draw(st.integers(1, 6))
    gone = to_remove(numbers, whole, newest, limit)
    kept = [number for number in numbers if number not in gone]
    assert newest in kept
    assert len(kept) == min(limit, len(numbers))
    for lost in gone:
        assert all((stayed in whole, stayed) > (lost in whole, lost) for stayed in kept)


def test_without_a_limit_nothing_goes():
    assert to_remove([0, 1, 2], {0, 1, 2}, 2, None) == []


def test_only_automatic_folders_count_and_only_they_go(tmp_path):
    for name in ("checkpoint_0", "checkpoint_1", "checkpoint_2", "best", "checkpoint_x"):
        (tmp_path / name).mkdir()
    assert numbers_in(tmp_path) == [0, 1, 2]
    gone = prune(tmp_path, tmp_path / "checkpoint_2", 1)
    assert [path.name for path in gone] == ["checkpoint_0", "checkpoint_1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "checkpoint_2", "checkpoint_x"]


def test_the_next_number_follows_the_highest_folder(tmp_path):
    assert next_number(tmp_path / "missing") == 0
    (tmp_path / "checkpoint_7").mkdir()
    assert next_number(tmp_path) == 8
    assert next_number(tmp_path, 12) == 12
    (tmp_path / "checkpoint_8").write_text("a file")
    (tmp_path / "checkpoint_9").symlink_to("nowhere")
    assert next_number(tmp_path) == 10
    assert numbers_in(tmp_path) == [7]
