"""Files of whole lines: numbered runs, resumed runs, torn ends and full disks."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acc_trainer.tracking import run_files
from acc_trainer.tracking.run_files import LineFile, open_run_file, write_whole


def write(folder, line, resume=False, name="run"):
    file = open_run_file(folder, name, ".jsonl", resume)
    file.append(line)
    file.close()
    return file.path


def test_runs_of_one_name_never_mix_and_a_resumed_one_continues_the_newest(tmp_path):
    names = [write(tmp_path, line).name for line in ("a", "b", "c")]
    assert names == ["run.jsonl", "run~2.jsonl", "run~3.jsonl"]
    write(tmp_path, "other", name="run.2")
    assert write(tmp_path, "d", resume=True).name == "run~3.jsonl"
    assert (tmp_path / "run~3.jsonl").read_text() == "c\nd\n"


def test_tenth_comes_after_second_and_a_missing_one_begins(tmp_path):
    assert write(tmp_path, "a", resume=True).name == "run.jsonl"
    for _ in range(10):
        last = write(tmp_path, "b").name
    assert last == "run~11.jsonl"
    assert write(tmp_path, "c", resume=True).name == last


def test_a_run_name_may_have_folders_in_it(tmp_path):
    assert write(tmp_path, "a", name="team/run") == tmp_path / "team" / "run.jsonl"


@pytest.mark.parametrize("name", ["../run", "team/../../run", "/run"])
def test_a_run_name_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    folder = tmp_path / "runs"
    with pytest.raises(ValueError, match=f"the run name '{name}.jsonl' leads out of the folder"):
        write(folder, "a", name=name)
    assert not list(tmp_path.rglob("*.jsonl"))


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"))),
    st.integers(min_value=0, max_value=200),
)
def test_however_a_file_was_cut_only_whole_lines_stay(tmp_path_factory, lines, cut):
    path = tmp_path_factory.mktemp("cut") / "run.jsonl"
    whole = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(whole[:cut])
    file = LineFile(path)
    file.append("more")
    file.close()
    kept = path.read_bytes().split(b"\n")
    assert kept[-2:] == [b"more", b""]
    assert kept[:-2] == whole[:cut].split(b"\n")[:-1]


def test_half_a_line_is_found_also_before_the_last_piece_that_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "_TAIL", 4)
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"whole\nhalf a line that is longer than a piece")
    LineFile(path).close()
    assert path.read_bytes() == b"whole\n"


def test_nothing_of_a_line_stays_when_the_disk_is_full(tmp_path):
    class Full(io.FileIO):
        room = 9

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            written = super().write(data[: self.room])
            self.room -= written
            return written

    file = LineFile(tmp_path / "run.jsonl", new=True)
    file._file = Full(file.path, "a")
    file.append("first")  # 6 bytes
    with pytest.raises(OSError, match="No space left"):
        file.append("second")
    assert file.path.read_bytes() == b"first\n"


def test_a_short_write_is_carried_on(tmp_path):
    class Slow(io.FileIO):
        def write(self, data):
            return super().write(data[:2])

    file = LineFile(tmp_path / "run.jsonl", new=True)
    file._file = Slow(file.path, "a")
    file.append("in pieces")
    assert file.path.read_bytes() == b"in pieces\n"


def test_a_whole_file_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "settings.json"
    write_whole(path, "old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
