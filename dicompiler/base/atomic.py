"""Files and directories that commands write: they appear whole or not at all, and what has not changed is left alone.

A path goes in, a path to fill comes out. A build system that looks at times thereby sees just what has become other.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dicompiler.base.errors import DicompilerError

LISTED = ".outputs"
"""The file in a directory of ours that names what is ours in it: a relative path each line, the main file first."""


@contextmanager
def whole(path: Path, cannot: str = "it cannot be written") -> Iterator[Path]:
    """A path to write instead of `path`, in a hidden directory beside it; moved in when the block ends well, unless a
    file with the same bytes is there already, which stays as it is, with its times.

    Nothing is left behind by a block that fails. DicompilerError, in the words of `cannot`, where it cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".dicompiler-") as temporary:
            stage = Path(temporary, path.name)
            yield stage
            if not _same_bytes(stage, path):
                os.replace(stage, path)
    except OSError as error:
        raise DicompilerError(f"{path}: {cannot}: {error.strerror or error}") from error


def check_place(output: Path, mark: str, what: str) -> None:
    """An earlier output of the same kind, known by LISTED, which begins with `mark`, is replaced; anything else that is
    there is refused (a directory without a file is nothing). `what`: how errors call such an output ("artifact")."""
    if (output / LISTED).is_file():
        known = listed(output)[0] == mark
    else:
        known = not output.exists() or (output.is_dir() and not _holds_any(output))
    if not known:
        missing = f" (its list, {LISTED!r}, is missing)" if (output / mark).is_file() else ""
        raise DicompilerError(
            f"{output}: it exists and is no {what} of ours{missing}: choose another place or remove it"
        )
    if not output.absolute().parent.is_dir():
        raise DicompilerError(f"{output}: its parent is no directory: create it first")


@contextmanager
def moved_in_whole(output: Path, mark: str, what: str) -> Iterator[Path]:
    """A fresh directory beside `output` that takes its place in the end; see `check_place`.

    What was ours in `output` and is not written again goes. A file of the same bytes and mode stays the very file, with
    its times; but `mark`, the main file, is a new one where any is: its time alone tells. Where all are the same,
    `output` is not touched. What is not ours in `output` stays.
    """
    check_place(output, mark, what)
    place = output.resolve() if output.is_symlink() else output
    scratch = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.absolute().parent))
    try:
        stage = scratch / "new"
        stage.mkdir()
        yield stage
        files, _ = _entries(stage)
        names = [mark, *sorted(files - {mark})]
        (stage / LISTED).write_bytes(b"".join(os.fsencode(f"{name}\n") for name in names))
        if place.exists() and not _carry_over(place, stage, names):
            return
        if place.exists():
            place.rename(scratch / "old")
        stage.rename(place)
    except OSError as error:
        raise DicompilerError(f"{output}: it cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def listed(output: Path) -> tuple[str, ...]:
    """The files in a directory of ours that are ours, by relative path, the main file first."""
    return tuple(os.fsdecode((output / LISTED).read_bytes()).removesuffix("\n").split("\n"))


def _carry_over(old: Path, stage: Path, names: list[str]) -> bool:
    """Puts into `stage` what stays of `old`: unchanged files but the main one, and all that is not ours. Whether
    anything of ours, its `names` included, is other than before.

    `old` stays as it is, so that a failure leaves it.
    """
    before = set(listed(old)) if (old / LISTED).is_file() else set[str]()
    same = [name for name in names if name in before and _same(old / name, stage / name)]
    if len(same) == len(names) == len(before):
        return False
    for name in (*set(same) - {names[0]}, *([LISTED] if _same(old / LISTED, stage / LISTED) else [])):
        (stage / name).unlink()
        _link(old / name, stage / name)
    files, directories = _entries(old)
    ours = {*before, LISTED}
    holding = {str(parent) for name in ours for parent in Path(name).parents}
    for name in sorted(directories - holding):
        _make_way(old, stage, name, (stage / name).is_dir())
        (stage / name).mkdir(parents=True, exist_ok=True)
    for name in sorted(files - ours):
        _make_way(old, stage, name, False)
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        _link(old / name, stage / name)
    for name in sorted(directories - holding, reverse=True):
        shutil.copystat(old / name, stage / name)
    return True


def _make_way(old: Path, stage: Path, name: str, fits: bool) -> None:
    """DicompilerError where something that is not ours stands where we write a file, or the other way round."""
    taken = [path for path in (stage / name, *(stage / name).parents) if path.is_relative_to(stage)]
    blocked = any(path.is_file() or path.is_symlink() for path in taken)
    if not fits and (blocked or os.path.lexists(stage / name)):
        raise DicompilerError(f"{old / name}: it is not ours, and stands where we write: move it elsewhere")


def _holds_any(root: Path) -> bool:
    """Whether there is a file or link anywhere below `root`."""
    walk = os.walk(root)
    return any(names or any(Path(base, name).is_symlink() for name in inner) for base, inner, names in walk)


def _entries(root: Path) -> tuple[set[str], set[str]]:
    """The files and links below `root`, and the directories, by relative path."""
    files, directories = set[str](), set[str]()
    for base, inner, names in os.walk(root):
        for name in (*inner, *names):
            path = Path(base, name)
            (directories if path.is_dir() and not path.is_symlink() else files).add(str(path.relative_to(root)))
    return files, directories


def _same(one: Path, other: Path) -> bool:
    return _same_bytes(one, other) and one.stat().st_mode == other.stat().st_mode


def _same_bytes(one: Path, other: Path) -> bool:
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


def _link(old: Path, new: Path) -> None:
    """Makes `new` the file that `old` is; where it may not be linked, a copy with its times."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.EXDEV:  # something is mounted there, which a copy would tear apart
            raise
        shutil.copy2(old, new, follow_symlinks=False)
