"""Files and directories that commands write: they appear whole or not at all, and what has not changed is left alone.

A path goes in, a path to fill comes out. A build system that looks at times thereby sees just what has become other.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dicompiler.base.errors import DicompilerError

TRACKED_LIST_NAME = ".outputs"
"""The file in a directory of ours that names what is ours in it: a relative path each line, the main file first."""

OWNER_MARK_NAME = ".made-by-dicompiler"
"""The file in a hidden directory that is being filled, which says so."""
_MAX_NAME_CHARS = 200
"""Characters of an output's name that a hidden directory beside it begins with."""


@contextmanager
def atomic_file(path: Path, cannot: str = "it cannot be written") -> Iterator[Path]:
    """A path to write instead of `path`, in a hidden directory beside it; moved in when the block ends well, unless a
    file with the same bytes is there already, which stays as it is, with its times.

    Nothing is left behind by a block that fails, and what one that was killed has left goes with the next that writes
    there. DicompilerError, in the words of `cannot`, where it cannot be written.
    """
    with _os_errors_as_ours(path, cannot), _scratch_directory(path) as scratch:
        (scratch / "new").mkdir()
        stage = scratch / "new" / path.name
        yield stage
        if not _has_same_bytes(stage, path):
            os.replace(stage, path)


def check_output_directory(output: Path, mark: str, what: str) -> None:
    """An earlier output of the same kind, known by LISTED, which begins with `mark`, is replaced; anything else that is
    there is refused (a directory without a file is nothing). `what`: how errors call such an output ("artifact")."""
    with _os_errors_as_ours(output):
        _check_replaceable(output, mark, what)
        check_writable(output)


def _check_replaceable(output: Path, mark: str, what: str) -> None:
    if (output / TRACKED_LIST_NAME).is_file():
        known = tracked_files(output)[0] == mark
    else:
        known = not output.exists() or (output.is_dir() and not _has_any_file(output))
    if not known:
        missing = f" (its list, {TRACKED_LIST_NAME!r}, is missing)" if (output / mark).is_file() else ""
        raise DicompilerError(
            f"{output}: it exists and is no {what} of ours{missing}: choose another place or remove it"
        )
    if not output.absolute().parent.is_dir():
        raise DicompilerError(f"{output}: its parent is no directory: create it first")


def check_writable(path: Path | None) -> None:
    """DicompilerError where nothing can be written at `path`: said before the work, not after."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise DicompilerError(f"{path}: there is no directory {str(path.parent)!r}")
    try:
        path.is_symlink()  # a name can be too long
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".dicompiler-").cleanup()
    except OSError as error:
        raise DicompilerError(f"{path}: it cannot be written: {error.strerror}: choose another place") from None


@contextmanager
def _os_errors_as_ours(path: Path, cannot: str = "it cannot be written") -> Iterator[None]:
    """DicompilerError, in the words of `cannot`, for what the system refuses in the block."""
    try:
        yield
    except OSError as error:
        raise DicompilerError(f"{path}: {cannot}: {error.strerror or error}") from error


@contextmanager
def atomic_directory(output: Path, mark: str, what: str) -> Iterator[Path]:
    """A fresh directory beside `output` that takes its place in the end; see `check_place`.

    What was ours in `output` and is not written again goes. A file of the same bytes and mode stays the very file, with
    its times; but `mark`, the main file, is a new one where any is: its time alone tells. Where all are the same,
    `output` is not touched. What is not ours in `output` stays. What others that were killed have left beside `output`
    goes.
    """
    place = output.resolve() if output.is_symlink() else output
    check_output_directory(output, mark, what)
    with _os_errors_as_ours(output), _scratch_directory(place.absolute()) as scratch:
        stage = scratch / "new"
        stage.mkdir()
        yield stage
        files, _ = _relative_entries(stage)
        names = [mark, *sorted(files - {mark})]
        (stage / TRACKED_LIST_NAME).write_bytes(b"".join(os.fsencode(f"{name}\n") for name in names))
        shutil.copymode(
            stage / mark, stage / TRACKED_LIST_NAME
        )  # who may not read what is there need not know its names
        if place.exists() and not _carry_over(place, stage, names):
            return
        if not place.exists():
            stage.rename(place)
        elif not _swap_directories(stage, place):
            place.rename(scratch / "old")
            stage.rename(place)


@contextmanager
def _scratch_directory(place: Path) -> Iterator[Path]:
    """A hidden directory beside `place`, in the end taken away; so are those of the same place whose makers are dead.

    Each holds MADE, which its maker has locked as long as it lives: the system lets go of that lock, however it ends.
    """
    _remove_abandoned(place)
    scratch = Path(tempfile.mkdtemp(prefix=f".{place.name[:_MAX_NAME_CHARS]}.", dir=place.parent))
    try:
        with (scratch / "unlocked").open("wb") as file:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (scratch / "unlocked").rename(scratch / OWNER_MARK_NAME)  # nobody sees it without its lock
            yield scratch
    finally:
        _remove_scratch(scratch)


def _remove_scratch(scratch: Path) -> None:
    """Takes a directory of `_scratch` away, MADE last: whoever is killed meanwhile leaves what can be recognised."""
    for part in ("new", "old"):
        shutil.rmtree(scratch / part, ignore_errors=True)
    shutil.rmtree(scratch, ignore_errors=True)


def _remove_abandoned(place: Path) -> None:
    """Takes away what dead makers have left beside `place`."""
    pattern = re.compile(rf"\.{re.escape(place.name[:_MAX_NAME_CHARS])}\.[a-z0-9_]{{8}}")
    with suppress(OSError):
        for name in sorted(name for name in os.listdir(place.parent) if pattern.fullmatch(name)):
            _remove_if_abandoned(place, place.parent / name)


def _remove_if_abandoned(place: Path, scratch: Path) -> None:
    with suppress(OSError):
        if scratch.lstat().st_uid != os.geteuid() or not stat.S_ISREG((scratch / OWNER_MARK_NAME).lstat().st_mode):
            return
        with (scratch / OWNER_MARK_NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its maker lives
            old = scratch / "old"
            if old.is_dir() and not os.path.lexists(place):  # killed between the two moves: what was there goes back
                old.rename(place)
            if not _has_unsaved_files(old, place):
                _remove_scratch(scratch)


def _has_unsaved_files(old: Path, place: Path) -> bool:
    """Whether there is anything in `old` that is not ours and not in `place` as well."""
    if not old.is_dir():
        return False
    ours = {*(tracked_files(old) if (old / TRACKED_LIST_NAME).is_file() else ()), TRACKED_LIST_NAME}
    return any(not _has_same_bytes(old / name, place / name) for name in _relative_entries(old)[0] - ours)


def _swap_directories(one: Path, other: Path) -> bool:
    """Whether two directories have changed places, in a single step: at no time is either missing. Linux alone can."""
    import ctypes

    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
    return exchange is not None and exchange(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def tracked_files(output: Path) -> tuple[str, ...]:
    """The files in a directory of ours that are ours, by relative path, the main file first."""
    return tuple(os.fsdecode((output / TRACKED_LIST_NAME).read_bytes()).removesuffix("\n").split("\n"))


def _carry_over(old: Path, stage: Path, names: list[str]) -> bool:
    """Puts into `stage` what stays of `old`: unchanged files but the main one, and all that is not ours. Whether
    anything of ours, its `names` included, is other than before.

    `old` stays as it is, so that a failure leaves it.
    """
    before = set(tracked_files(old)) if (old / TRACKED_LIST_NAME).is_file() else set[str]()
    same = [name for name in names if name in before and _has_same_bytes_and_mode(old / name, stage / name)]
    if len(same) == len(names) == len(before):
        return False
    for name in (
        *set(same) - {names[0]},
        *([TRACKED_LIST_NAME] if _has_same_bytes_and_mode(old / TRACKED_LIST_NAME, stage / TRACKED_LIST_NAME) else []),
    ):
        (stage / name).unlink()
        _link_or_copy(old / name, stage / name)
    files, directories = _relative_entries(old)
    ours = {*before, TRACKED_LIST_NAME}
    holding = {str(parent) for name in ours for parent in Path(name).parents}
    for name in sorted(directories - holding):
        _check_not_in_the_way(old, stage, name, (stage / name).is_dir())
        (stage / name).mkdir(parents=True, exist_ok=True)
    for name in sorted(files - ours):
        _check_not_in_the_way(old, stage, name, False)
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(old / name, stage / name)
    for name in sorted(directories - holding, reverse=True):
        shutil.copystat(old / name, stage / name)
    return True


def _check_not_in_the_way(old: Path, stage: Path, name: str, fits: bool) -> None:
    """DicompilerError where something that is not ours stands where we write a file, or the other way round."""
    taken = [path for path in (stage / name, *(stage / name).parents) if path.is_relative_to(stage)]
    blocked = any(path.is_file() or path.is_symlink() for path in taken)
    if not fits and (blocked or os.path.lexists(stage / name)):
        raise DicompilerError(f"{old / name}: it is not ours, and stands where we write: move it elsewhere")


def _has_any_file(root: Path) -> bool:
    """Whether there is a file or link anywhere below `root`."""
    walk = os.walk(root)
    return any(names or any(Path(base, name).is_symlink() for name in inner) for base, inner, names in walk)


def _relative_entries(root: Path) -> tuple[set[str], set[str]]:
    """The files and links below `root`, and the directories, by relative path."""
    files, directories = set[str](), set[str]()
    for base, inner, names in os.walk(root):
        for name in (*inner, *names):
            path = Path(base, name)
            (directories if path.is_dir() and not path.is_symlink() else files).add(str(path.relative_to(root)))
    return files, directories


def _has_same_bytes_and_mode(one: Path, other: Path) -> bool:
    return _has_same_bytes(one, other) and one.stat().st_mode == other.stat().st_mode


def _has_same_bytes(one: Path, other: Path) -> bool:
    """Whether both are plain files, and equal."""
    if not all(path.is_file() and not path.is_symlink() for path in (one, other)):
        return False
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as a, other.open("rb") as b:
        while chunk := a.read(1 << 20):
            if chunk != b.read(1 << 20):
                return False
    return True


def _link_or_copy(old: Path, new: Path) -> None:
    """Makes `new` the file that `old` is; where it may not be linked, a copy with its times."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.EXDEV:  # something is mounted there, which a copy would tear apart
            raise
        shutil.copy2(old, new, follow_symlinks=False)
