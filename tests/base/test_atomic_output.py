"""Output files and directories appear as a whole or not at all; unchanged and foreign files are kept."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dicompiler.base import atomic_output
from dicompiler.base.atomic_output import (
    TRACKED_LIST_NAME,
    atomic_directory,
    atomic_file,
    check_output_directory,
    check_writable,
    tracked_files,
)
from dicompiler.base.errors import DicompilerError

NOBODY = 65534
FIRST = {"main.json": "1", "pi01/a.bin": "a", "pi01/b.bin": "b", "pi02/c.bin": "c"}


def write(output: Path, files: Mapping[str, str]) -> None:
    """Write an output directory with these files."""
    with atomic_directory(output, "main.json", "output") as stage:
        for name, text in {"main.json": "", **files}.items():
            (stage / name).parent.mkdir(exist_ok=True, parents=True)
            (stage / name).write_text(text)


def held(output: Path) -> dict[str, str]:
    """Return the texts of all files except the file list."""
    paths = [path for path in output.rglob("*") if path.is_file() and path.name != TRACKED_LIST_NAME]
    return {str(path.relative_to(output)): path.read_text() for path in sorted(paths)}


def stamps(output: Path) -> dict[str, tuple[int, int]]:
    """Return inode and modification time of all files and directories."""
    paths = [output, *output.rglob("*")]
    return {str(path.relative_to(output)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    place = tmp_path / "out"
    write(place, FIRST)
    return place


def test_lists_generated_files_with_the_main_file_first(output: Path) -> None:
    assert tracked_files(output) == ("main.json", "pi01/a.bin", "pi01/b.bin", "pi02/c.bin")
    assert held(output) == FIRST
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_writing_the_same_content_changes_nothing(output: Path) -> None:
    before = stamps(output)
    write(output, FIRST)
    assert stamps(output) == before


def test_keeps_equal_files_and_replaces_the_main_file(output: Path) -> None:
    before = stamps(output)
    write(output, {**FIRST, "pi01/b.bin": "B"})
    after = stamps(output)
    assert held(output) == {**FIRST, "pi01/b.bin": "B"}
    files = {name for name in FIRST if before[name] == after[name]}
    assert files == {"pi01/a.bin", "pi02/c.bin"}
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_different_file_mode_counts_as_a_change(output: Path) -> None:
    (output / "pi01" / "a.bin").chmod(0o600)
    write(output, FIRST)
    assert (output / "pi01" / "a.bin").stat().st_mode & 0o777 == (output / "main.json").stat().st_mode & 0o777


def test_removes_old_generated_files_and_keeps_other_files(output: Path) -> None:
    (output / "pi02" / "build" / "empty").mkdir(parents=True)
    (output / "pi02" / "build" / "own.o").write_text("own")
    (output / "notes.txt").write_text("notes")
    (output / "link").symlink_to("nowhere")
    os.mkfifo(output / "pipe")
    os.utime(output / "notes.txt", (1e9, 1e9))
    before = stamps(output / "pi02" / "build")
    write(output, {"main.json": "2", "pi01/a.bin": "a"})
    assert not (output / "pi02" / "c.bin").exists() and not (output / "pi01" / "b.bin").exists()
    assert (output / "notes.txt").stat().st_mtime == 1e9
    assert (output / "link").readlink() == Path("nowhere") and (output / "pipe").is_fifo()
    after = stamps(output / "pi02" / "build")
    assert {name: time for name, (_, time) in before.items()} == {name: time for name, (_, time) in after.items()}
    assert before["own.o"] == after["own.o"]
    write(output, {"main.json": "3"})  # notes.txt still counts as a foreign file in the second run, and is kept.
    assert (output / "notes.txt").is_file() and not (output / "pi01").exists()


OURS = st.dictionaries(st.sampled_from(["a", "d/a", "d/b", "e/f/c"]), st.sampled_from(["0", "1"]))
OTHERS = st.dictionaries(st.sampled_from(["x", "d/x", "e/y/z", "g/x"]), st.just("own"))


@settings(max_examples=60, deadline=None)
@given(outputs=st.lists(st.tuples(OURS, OTHERS), min_size=2, max_size=4))
def test_replaces_generated_files_and_keeps_all_others(
    outputs: list[tuple[dict[str, str], dict[str, str]]],
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        output, others, ours = Path(temporary, "out"), dict[str, str](), dict[str, str]()
        for ours_now, others_now in outputs:
            before = stamps(output) if output.exists() else {}
            write(output, ours_now)
            after = stamps(output)
            assert held(output) == {**ours_now, **others, "main.json": ""}
            kept = {name for name in ours_now if ours_now[name] == ours.get(name)} | others.keys()
            assert {name for name in kept if before[name] != after[name]} == set()
            assert (before.get("main.json") == after["main.json"]) == (bool(before) and ours == ours_now)
            for name, text in others_now.items():
                (output / name).parent.mkdir(parents=True, exist_ok=True)
                (output / name).write_text(text)
            others, ours = {**others, **others_now}, ours_now


def write_as_nobody(output: Path, files: Mapping[str, str]) -> None:
    """Run `write` as another user. Linux does not let this user link to files that it can only read."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            write(output, files)
        finally:
            os._exit(1 if sys.exc_info()[0] else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_copies_files_with_their_times_if_links_are_not_allowed() -> None:
    # Other users cannot write into the temporary directories of pytest.
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary).chmod(0o777)
        output = Path(temporary, "out")
        write_as_nobody(output, FIRST)
        (output / "notes.txt").write_text("notes")
        os.utime(output / "notes.txt", (1e9, 1e9))
        owner = (output / "notes.txt").stat().st_uid
        write_as_nobody(output, {**FIRST, "pi01/b.bin": "B"})
        assert held(output) == {**FIRST, "pi01/b.bin": "B", "notes.txt": "notes"}
        assert (output / "notes.txt").stat().st_mtime == 1e9
        if Path("/proc/sys/fs/protected_hardlinks").read_text().strip() == "1":
            assert (output / "notes.txt").stat().st_uid == NOBODY != owner


def test_does_not_touch_a_mounted_file_system(output: Path) -> None:
    (output / "mounted").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", output / "mounted"], check=True)
    try:
        (output / "mounted" / "own").write_text("own")
        before = stamps(output)
        with pytest.raises(DicompilerError, match="cannot be written: Invalid cross-device link"):
            write(output, {"main.json": "2"})
        assert stamps(output) == before
    finally:
        subprocess.run(["umount", output / "mounted"], check=True)


@pytest.mark.parametrize("name", ["pi03", "pi03/d.bin"])
def test_never_overwrites_files_of_the_user(output: Path, name: str) -> None:
    (output / name).parent.mkdir(exist_ok=True)
    (output / name).write_text("own")
    before = stamps(output)
    with pytest.raises(
        DicompilerError, match=rf"{name}: dicompiler did not write it, and needs its path: move it elsewhere"
    ):
        write(output, {**FIRST, "pi03/d.bin": "d"})
    assert stamps(output) == before
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_never_replaces_a_directory_of_the_user_by_a_file(output: Path) -> None:
    (output / "d.bin").mkdir()
    with pytest.raises(DicompilerError, match=r"d\.bin: dicompiler did not write it"):
        write(output, {**FIRST, "d.bin": "d"})
    assert held(output) == FIRST


def test_failure_leaves_the_old_output(output: Path) -> None:
    (output / "notes.txt").write_text("notes")
    before = stamps(output)

    def half() -> None:
        with atomic_directory(output, "main.json", "output") as stage:
            (stage / "main.json").write_text("half")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        half()
    assert stamps(output) == before
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_rewrites_an_output_without_its_main_file(output: Path) -> None:
    (output / "main.json").unlink()  # A `make clean` in the output directory could remove the main file.
    before = stamps(output)
    write(output, FIRST)
    assert held(output) == FIRST
    assert stamps(output)["pi01/a.bin"] == before["pi01/a.bin"]


def test_keeps_a_symbolic_link_to_an_output(output: Path) -> None:
    link = output.parent / "link"
    link.symlink_to(output)
    write(link, {"main.json": "2"})
    assert link.is_symlink() and held(output) == {"main.json": "2"}


def test_rejects_existing_foreign_paths(tmp_path: Path) -> None:
    place = tmp_path / "place"
    (place / "inner").mkdir(parents=True)
    write(place, {})  # An existing directory may become the output if it is empty.
    assert (place / "inner").is_dir()
    (place / TRACKED_LIST_NAME).unlink()
    (place / "main.json").write_text("1")
    with pytest.raises(
        DicompilerError,
        match=r"not a directory that dicompiler wrote as output \(its file list '\.outputs' is missing\): choose",
    ):
        check_output_directory(place, "main.json", "output")
    (place / "main.json").rename(place / "other.json")
    with pytest.raises(
        DicompilerError,
        match=r"not a directory that dicompiler wrote as output: give a new directory, such as .*/place/out",
    ):
        check_output_directory(place, "main.json", "output")
    (place / TRACKED_LIST_NAME).write_text("other.json\n")
    with pytest.raises(DicompilerError, match="not a directory that dicompiler wrote as output: give a new"):
        check_output_directory(place, "main.json", "output")


def test_single_file_with_equal_bytes_keeps_its_time(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text, new in (("one", True), ("one", False), ("two", True)):
        if path.exists():
            os.utime(path, (1e9, 1e9))
        with atomic_file(path) as stage:
            stage.write_text(text)
        assert path.read_text() == text
        assert (path.stat().st_mtime != 1e9) == new


def test_replaces_an_earlier_output_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(self: Path, target: Path, rename: Callable[[Path, Path], Path] = Path.rename) -> Path:
        assert self.name not in ("new", "out"), "for a moment nothing is there"
        return rename(self, target)

    for text in ("one", "two"):
        with atomic_directory(tmp_path / "out", "main", "thing") as stage:
            (stage / "main").write_text(text)
        monkeypatch.setattr(Path, "rename", renamed)
    assert (tmp_path / "out" / "main").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from dicompiler.base import atomic_output
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "between":
    atomic_output._swap_directories = lambda *_: False
    Path.rename = lambda self, target, rename=Path.rename: kill() if self.name == "new" else rename(self, target)
if sys.argv[2] == "behind":
    atomic_output._remove_scratch = kill
with atomic_output.atomic_directory(Path(sys.argv[1]), "main.json", "output") as stage:
    (stage / "main.json").write_bytes(bytes(100_000))
    if sys.argv[2] == "inside":
        kill()
    if sys.argv[2] == "waits":
        print("inside", flush=True)
        sys.stdin.read()
"""


def writer(output: Path, how: str) -> subprocess.Popen[bytes]:
    """Return a process that writes `output`, and then kills itself at some point or waits."""
    paths = [os.path.abspath(entry) for entry in sys.path if entry]
    command = [sys.executable, "-c", KILLED, str(output), how, *paths]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("how", ["inside", "between", "behind"])
def test_removes_scratch_directories_of_killed_writers(how: str, output: Path) -> None:
    (output / "notes.txt").write_text("notes")
    for _ in range(3):
        assert writer(output, how).wait(20) == -9
    write(output, {"main.json": "2"})
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert held(output) == {"main.json": "2", "notes.txt": "notes"}


def test_keeps_scratch_directories_of_running_writers(output: Path) -> None:
    with writer(output, "waits") as living:
        assert living.stdout is not None and living.stdout.readline() == b"inside\n"
        write(output, {"main.json": "2"})
        (scratch,) = [path for path in output.parent.iterdir() if path != output]
        assert (scratch / "new" / "main.json").stat().st_size == 100_000
        living.communicate(timeout=20)
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert (output / "main.json").stat().st_size == 100_000


def test_keeps_foreign_files_next_to_an_output(output: Path) -> None:
    names = [".out.abcdefgh", ".out.12345678", ".outs.abcdefgh", ".out.abc", "out.abcdefgh"]
    for name in names:
        (output.parent / name / "new").mkdir(parents=True)
        (output.parent / name / "new" / "mine.txt").write_text("mine")
    for name in names[2:]:
        (output.parent / name / ".made-by-dicompiler").touch()
    (output.parent / ".out.12345678" / ".made-by-dicompiler").symlink_to("new/mine.txt")
    os.mkfifo(output.parent / ".out.abcdefgh" / ".made-by-dicompiler")
    write(output, {"main.json": "2"})
    assert {path.name for path in output.parent.iterdir()} == {"out", *names}
    assert all((output.parent / name / "new" / "mine.txt").is_file() for name in names)


def test_file_behind_a_symbolic_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "link").symlink_to("inner/real.json")
    for text in ("first", "second"):
        with atomic_file(tmp_path / "link") as stage:
            stage.write_text(text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "inner" / "real.json").read_text() == text
    assert [path.name for path in (tmp_path / "inner").iterdir()] == ["real.json"]


def test_devices_and_pipes_are_written_to_and_stay(tmp_path: Path) -> None:
    pipe, null = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        for path in (null, pipe):
            check_writable(path)
            with atomic_file(path) as stage:
                stage.write_text("text")
        assert reader.communicate(timeout=60)[0] == b"text"
    assert stat.S_ISCHR(null.stat().st_mode) and stat.S_ISFIFO(pipe.stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 2


def test_removes_scratch_files_of_killed_writers(tmp_path: Path) -> None:
    script = (
        "import os, sys; sys.path[:0] = sys.argv[2:]\nfrom pathlib import Path\n"
        "from dicompiler.base.atomic_output import atomic_file\n"
        "with atomic_file(Path(sys.argv[1])) as stage:\n    stage.write_text('half')\n    os.kill(os.getpid(), 9)\n"
    )
    paths = [os.path.abspath(entry) for entry in sys.path if entry]
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "plan.json"), *paths], check=False)
    assert done.returncode == -9 and list(tmp_path.iterdir())
    with atomic_file(tmp_path / "plan.json") as stage:
        stage.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from dicompiler.base.atomic_output import atomic_directory
for count in range(60):
    with atomic_directory(Path(sys.argv[1]), "main.json", "output") as stage:
        (stage / "main.json").write_text(str(count))
        for number in range(count % 7):
            (stage / f"{number}.bin").write_text(f"{count % 7}")
"""


def test_processes_that_write_the_same_output_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    paths = [os.path.abspath(entry) for entry in sys.path if entry]
    command = [sys.executable, "-c", WRITER, str(tmp_path / "out"), *paths]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate(timeout=60)[1] for process in writers] == [b"", b"", b""]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    files = held(tmp_path / "out")
    count = int(files.pop("main.json"))
    assert files == {f"{number}.bin": f"{count % 7}" for number in range(count % 7)}
    assert set(tracked_files(tmp_path / "out")) == {"main.json", *files}


def test_output_that_another_process_has_locked_is_an_error(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_output, "_MAX_LOCK_WAIT_S", 0.05)
    descriptor = os.open(output, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(DicompilerError, match=r"out: another process has locked it for 0\.05 s: end that process"):
        write(output, {"main.json": "2"})
    os.close(descriptor)
    assert held(output) == FIRST
