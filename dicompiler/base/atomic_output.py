"""Atomic writing of files and directories: an output appears completely or not at all.

The caller writes to a scratch path, which replaces the output at the end. Unchanged files keep their modification
times, so that build systems see only real changes.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dicompiler.base.errors import DicompilerError
from dicompiler.base.termination import signal_deferral

TRACKED_LIST_NAME = ".outputs"
"""File in an output directory that lists the generated files: one relative path per line, the main file first."""
OWNER_MARK_NAME = ".made-by-dicompiler"
"""File in a scratch directory that shows that dicompiler created the directory. Its creator keeps the file locked."""
REMOVE_REMEDY = "choose another place or remove it"
_MAX_NAME_CHARS = 200
"""Maximum number of characters of the output's name that are used in the scratch directory's name."""
_MAX_LOCK_WAIT_S, _LOCK_RETRY_S = 120.0, 0.01
"""Seconds to wait for another process that replaces the same directory, and seconds between two attempts."""


@contextmanager
def atomic_file(path: Path, cannot: str = "it cannot be written") -> Iterator[Path]:
    """Yield a scratch path; the file written there replaces `path` when the block ends without an error.

    If `path` already contains the same bytes, it is not touched. If it is a symbolic link, the file to which it points
    is replaced. A device or named pipe, such as /dev/stdout, is written and never replaced.

    Args:
        path: The output file.
        cannot: Cause in the error message, such as "it cannot be written".

    Raises:
        DicompilerError: The file system reported an error.
    """
    if is_special_file(path):
        with _os_errors_as_ours(path, cannot), tempfile.TemporaryDirectory() as directory:
            stage = Path(directory, "new")
            yield stage
            with stage.open("rb") as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
        return
    place = path.resolve() if path.is_symlink() else path
    with _os_errors_as_ours(path, cannot), _scratch_directory(place) as scratch:
        (scratch / "new").mkdir()
        stage = scratch / "new" / place.name
        yield stage
        if not _has_same_bytes(stage, place):
            with signal_deferral:
                os.replace(stage, place)
                signal_deferral.note_commit()


def is_special_file(path: Path) -> bool:
    """Return True if the path exists and is neither a regular file nor a directory, for example a device or a pipe."""
    try:
        return path.exists() and not path.is_file() and not path.is_dir()
    except OSError:  # The name is too long, for example. The caller gets the same error when it writes the file.
        return False


def check_output_directory(output: Path, main_file: str, kind: str) -> None:
    """Raise DicompilerError if `output` cannot be written, or exists and is not an earlier output of the same kind.

    An empty directory may be replaced too.

    Args:
        output: The directory that will be written.
        main_file: Name of the main file, such as "artifact.json". An earlier output of the same kind has it as the
            first entry of its file list (`TRACKED_LIST_NAME`).
        kind: Word for the kind in error messages, such as "artifact".
    """
    with _os_errors_as_ours(output):
        _check_replaceable(output, main_file, kind)
        check_writable(output)


def _check_replaceable(output: Path, main_file: str, kind: str) -> None:
    if output.name in ("", "..") and output.is_dir():  # The paths '.' and '/' have an empty name.
        place = "the current directory" if output == Path() else "this directory"
        raise DicompilerError(f"{output}: {place} cannot be replaced: give a new directory, such as {output / 'out'}")
    if not _is_replaceable(output, main_file):
        missing = f" (its file list {TRACKED_LIST_NAME!r} is missing)" if (output / main_file).is_file() else ""
        has_other_files = output.is_dir() and not missing
        remedy = f"give a new directory, such as {output / 'out'}" if has_other_files else REMOVE_REMEDY
        raise DicompilerError(
            f"{output}: it exists and is not a directory that dicompiler wrote as {kind}{missing}: {remedy}"
        )
    if not output.absolute().parent.is_dir():
        raise DicompilerError(f"{output}: its parent directory does not exist: create it first")


def _is_replaceable(output: Path, main_file: str) -> bool:
    # Another process may create the directory after the check that it does not exist. Its file list then exists,
    # because directories are renamed to their place only when they are complete.
    if not output.exists() or (output.is_dir() and not _has_any_file(output)):
        return True
    return (output / TRACKED_LIST_NAME).is_file() and tracked_files(output)[0] == main_file


def check_writable(path: Path | None) -> None:
    """Raise DicompilerError if nothing can be written at `path`; do nothing if `path` is None."""
    if path is None or is_special_file(path):
        return
    if not path.parent.is_dir():
        raise DicompilerError(f"{path}: there is no directory {str(path.parent)!r}: create it, or choose another place")
    try:
        place = path.resolve() if path.is_symlink() else path  # is_symlink() raises OSError if the name is too long.
        # The test file has no name in the directory, so an interrupt cannot leave it behind.
        tempfile.TemporaryFile(dir=place.parent).close()
    except OSError as error:
        raise DicompilerError(f"{path}: it cannot be written: {error.strerror}: choose another place") from None


@contextmanager
def _os_errors_as_ours(path: Path, cannot: str = "it cannot be written") -> Iterator[None]:
    """Convert an OSError of the block into a DicompilerError: `path`, the text `cannot`, and the system's message."""
    try:
        yield
    except OSError as error:
        raise DicompilerError(f"{path}: {cannot}: {error.strerror or error}") from error


@contextmanager
def atomic_directory(output: Path, main_file: str, kind: str) -> Iterator[Path]:
    """Yield a new directory that replaces `output` when the block ends without an error.

    If all generated files are the same as before, `output` is not touched. Otherwise:
    - Files that the user added are kept.
    - Generated files that are not written again are removed.
    - Unchanged generated files keep their modification times, except `main_file`. Its new time shows build systems that
      something has changed.

    If several processes write the same directory at the same time, the last one wins.

    Args:
        output: The directory. It may exist if it is empty, or if it is an earlier output of the same kind.
        main_file: Name of the main file, which the block must write. It identifies the kind of output.
        kind: Word for the kind in error messages, such as "artifact".
    """
    place = output.resolve() if output.is_symlink() else output
    check_output_directory(output, main_file, kind)
    with _os_errors_as_ours(output), _scratch_directory(place.absolute()) as scratch:
        stage = scratch / "new"
        stage.mkdir()
        with _commits_ignored():
            yield stage
        files, _ = _relative_entries(stage)
        names = [main_file, *sorted(files - {main_file})]
        (stage / TRACKED_LIST_NAME).write_bytes(b"".join(os.fsencode(f"{name}\n") for name in names))
        # The list of generated files gets the permissions of the main file, so that the same users can read both.
        shutil.copymode(stage / main_file, stage / TRACKED_LIST_NAME)
        if _move_to_free_path(stage, place):
            return
        with _replacement_lock(place):
            _check_replaceable(output, main_file, kind)
            if _carry_over(place, stage, names):
                _replace_directory(place, stage, scratch / "old")


@contextmanager
def _commits_ignored() -> Iterator[None]:
    """Do not take the files that the block writes to a scratch directory for outputs of the command."""
    is_commit_last, signal_deferral.is_commit_last = signal_deferral.is_commit_last, False
    try:
        yield
    finally:
        signal_deferral.is_commit_last = is_commit_last


def _replace_directory(place: Path, stage: Path, old: Path) -> None:
    """Rename the directory `stage` to `place`. The previous directory gets the path `stage` or `old`."""
    with signal_deferral:
        if not _swap_directories(stage, place):
            place.rename(old)
            stage.rename(place)
        signal_deferral.note_commit()


def _move_to_free_path(stage: Path, place: Path) -> bool:
    """Rename the directory `stage` to `place`; return False if `place` exists, even if it was created just now."""
    if place.exists():
        return False
    with signal_deferral:
        try:
            stage.rename(place)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        signal_deferral.note_commit()
    return True


@contextmanager
def _replacement_lock(place: Path) -> Iterator[None]:
    """Prevent other processes from replacing the directory `place` until the block ends."""
    deadline = time.monotonic() + _MAX_LOCK_WAIT_S
    while time.monotonic() < deadline:
        # The lock is on the directory itself, so that no lock file remains.
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # While this process waited, another one may have put a new directory at this path. Then try again.
            if _try_lock(descriptor) and os.path.samestat(os.fstat(descriptor), place.stat()):
                yield
                return
        finally:
            os.close(descriptor)
        time.sleep(_LOCK_RETRY_S)
    raise DicompilerError(
        f"{place}: another process has locked it for {_MAX_LOCK_WAIT_S:g} s: end that process, or choose another place"
    )


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # The file system does not support locks, so the directory is replaced without one.
        return True
    return True


@contextmanager
def _scratch_directory(place: Path) -> Iterator[Path]:
    """Yield a new hidden directory next to `place`, and remove it when the block ends.

    Scratch directories that killed processes left behind are removed first. Their owner mark (a file) is not locked.
    """
    _remove_abandoned(place)
    scratch = None
    try:
        with signal_deferral:
            scratch = Path(tempfile.mkdtemp(prefix=f".{place.name[:_MAX_NAME_CHARS]}.", dir=place.parent))
        with (scratch / "unlocked").open("wb") as file:
            # This process keeps the owner mark locked, so that others do not remove the directory. If the file system
            # does not support locks, the directory gets no owner mark.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file is renamed to the owner mark only after it is locked: a process that finds an unlocked owner
                # mark removes the directory.
                (scratch / "unlocked").rename(scratch / OWNER_MARK_NAME)
            yield scratch
    finally:
        if scratch is not None:
            with signal_deferral:
                _remove_scratch(scratch)


def _remove_scratch(scratch: Path) -> None:
    # The owner mark is removed last: if the removal is interrupted, the next call recognizes the directory by it.
    for name in ("new", "old"):
        shutil.rmtree(scratch / name, ignore_errors=True)
    shutil.rmtree(scratch, ignore_errors=True)


def _remove_abandoned(place: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(place.name[:_MAX_NAME_CHARS])}\.[a-z0-9_]{{8}}")
    with suppress(OSError):
        for name in sorted(name for name in os.listdir(place.parent) if pattern.fullmatch(name)):
            _remove_if_abandoned(place, place.parent / name)


def _remove_if_abandoned(place: Path, scratch: Path) -> None:
    with suppress(OSError):
        if scratch.lstat().st_uid != os.geteuid() or not stat.S_ISREG((scratch / OWNER_MARK_NAME).lstat().st_mode):
            return
        with (scratch / OWNER_MARK_NAME).open("rb") as file:
            # If the process that created the scratch directory still runs, this call raises an OSError.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old = scratch / "old"
            # `atomic_directory` renames the previous output to `old`, and then the new one to `place`. If it was
            # killed in between, `old` is the only copy of the output, so it is moved back.
            if old.is_dir() and not os.path.lexists(place):
                old.rename(place)
            if not _has_unsaved_files(old, place):
                _remove_scratch(scratch)


def _has_unsaved_files(old: Path, place: Path) -> bool:
    """Return True if a user's file in `old` is missing in `place`, or has other bytes there.

    `old` is the previous output directory, which was renamed to be replaced. `place` is its former path.
    """
    if not old.is_dir():
        return False
    generated = {*(tracked_files(old) if (old / TRACKED_LIST_NAME).is_file() else ()), TRACKED_LIST_NAME}
    return any(not _has_same_bytes(old / name, place / name) for name in _relative_entries(old)[0] - generated)


def _swap_directories(first: Path, second: Path) -> bool:
    """Exchange two directories in one atomic step; return False if the system cannot do so (only Linux can)."""
    import ctypes

    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    at_fdcwd, rename_exchange = -100, 2  # These constants are in linux/fcntl.h and linux/fs.h.
    arguments = (at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange)
    return exchange is not None and exchange(*arguments) == 0


def tracked_files(output: Path) -> tuple[str, ...]:
    """Return the generated files of an output directory as relative paths, with the main file first."""
    return tuple(os.fsdecode((output / TRACKED_LIST_NAME).read_bytes()).removesuffix("\n").split("\n"))


def _carry_over(old: Path, stage: Path, names: list[str]) -> bool:
    """Add the unchanged generated files and all files of the user from directory `old` to directory `stage`.

    Args:
        old: The previous output directory, which is not changed.
        stage: The new directory.
        names: The generated files in `stage`, with the main file first.

    Returns:
        False if nothing was added, because the generated files are the same in both directories.
    """
    tracked = set(tracked_files(old)) if (old / TRACKED_LIST_NAME).is_file() else set[str]()
    unchanged = [name for name in names if name in tracked and _has_same_bytes_and_mode(old / name, stage / name)]
    if len(unchanged) == len(names) == len(tracked):
        return False
    is_same_list = _has_same_bytes_and_mode(old / TRACKED_LIST_NAME, stage / TRACKED_LIST_NAME)
    for name in (*set(unchanged) - {names[0]}, *([TRACKED_LIST_NAME] if is_same_list else [])):
        (stage / name).unlink()
        _link_or_copy(old / name, stage / name)
    files, directories = _relative_entries(old)
    generated = {*tracked, TRACKED_LIST_NAME}
    generated_directories = {str(parent) for name in generated for parent in Path(name).parents}
    for name in sorted(directories - generated_directories):
        _check_not_in_the_way(old, stage, name, (stage / name).is_dir())
        (stage / name).mkdir(parents=True, exist_ok=True)
    for name in sorted(files - generated):
        _check_not_in_the_way(old, stage, name, False)
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(old / name, stage / name)
    for name in sorted(directories - generated_directories, reverse=True):
        shutil.copystat(old / name, stage / name)
    return True


def _check_not_in_the_way(old: Path, stage: Path, name: str, is_allowed: bool) -> None:
    """Raise DicompilerError if a file or directory of the user has the path of a generated file.

    Args:
        old: The previous output directory.
        stage: The new directory with the generated files.
        name: Path of the user's file or directory, relative to `old`.
        is_allowed: True if `name` is a directory in both.
    """
    paths = [path for path in (stage / name, *(stage / name).parents) if path.is_relative_to(stage)]
    is_blocked = any(path.is_file() or path.is_symlink() for path in paths)
    if not is_allowed and (is_blocked or os.path.lexists(stage / name)):
        raise DicompilerError(f"{old / name}: dicompiler did not write it, and needs its path: move it elsewhere")


def _has_any_file(root: Path) -> bool:
    walk = os.walk(root)
    return any(names or any(Path(base, name).is_symlink() for name in inner) for base, inner, names in walk)


def _relative_entries(root: Path) -> tuple[set[str], set[str]]:
    files, directories = set[str](), set[str]()
    for base, inner, names in os.walk(root):
        for name in (*inner, *names):
            path = Path(base, name)
            (directories if path.is_dir() and not path.is_symlink() else files).add(str(path.relative_to(root)))
    return files, directories


def _has_same_bytes_and_mode(first: Path, second: Path) -> bool:
    return _has_same_bytes(first, second) and first.stat().st_mode == second.stat().st_mode


def _has_same_bytes(first: Path, second: Path) -> bool:
    are_files = all(path.is_file() and not path.is_symlink() for path in (first, second))
    return are_files and filecmp.cmp(first, second, shallow=False)


def _link_or_copy(old: Path, new: Path) -> None:
    """Make `new` a hard link to `old`, or a copy with the same times if the file system does not support links."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError as error:
        # EXDEV: `old` is on another file system, which is mounted inside the output directory. Such files are not
        # copied.
        if error.errno == errno.EXDEV:
            raise
        shutil.copy2(old, new, follow_symlinks=False)
