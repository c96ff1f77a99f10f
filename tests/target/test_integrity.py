"""Integrity: a changed byte breaks the checksum of a manifest, and file names of an artifact stay inside it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.handmade import halo
from support.running import emit
from support.tampering import flip, rewrite

from dicompiler.base.errors import DicompilerError
from dicompiler.target.manifest import (
    check_file_name,
    check_files,
    format_checksummed_json,
    format_json,
    has_valid_checksum,
    load_artifact,
    write_digests_and_checksum,
)
from dicompiler_targets.sockets.runtime.integrity import FileIntegrity, read_manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emit(halo(), tmp_path_factory.mktemp("made"))


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "a"))


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=4) | st.integers(), max_size=4), st.data())
def test_a_seal_breaks_with_any_byte(document: dict[str, object], data: st.DataObject) -> None:
    text = format_checksummed_json(document).encode()
    assert has_valid_checksum(text)
    at, other = data.draw(st.integers(0, len(text) - 1)), data.draw(st.integers(1, 255))
    assert not has_valid_checksum(text[:at] + bytes([text[at] ^ other]) + text[at + 1 :])


def test_digest_taken_while_writing_is_valid_until_the_first_checksum(tmp_path: Path) -> None:
    (tmp_path / "known").write_bytes(b"known")
    (tmp_path / "other").write_bytes(b"other")
    stated = {"known": {"bytes": 5, "digest": "1" * 64}}
    text = format_json({"files": stated, "checksum": "0" * 64})
    (tmp_path / "artifact.json").write_text(text)
    for known in ("1" * 64, f"sha256:{hashlib.sha256(b'known').hexdigest()}"):
        write_digests_and_checksum(tmp_path)
        files = json.loads((tmp_path / "artifact.json").read_bytes())["files"]
        digests = {name: record["digest"] for name, record in files.items()}
        assert digests == {"known": known, "other": f"sha256:{hashlib.sha256(b'other').hexdigest()}"}


def test_runtime_reads_the_same_checksums(artifact: Path) -> None:
    path, random = artifact / "a" / "manifest.json", Random(0)
    assert read_manifest(path)["device"] == "a"
    for _ in range(50):
        _, before = flip(path, random)
        with pytest.raises(ValueError, match="damaged, its checksum does not match: copy the device's directory again"):
            read_manifest(path)
        path.write_bytes(before)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/etc/passwd", "../x", "a/../b", "a/./b", "a//b", "a/", "/", "a\0b", "a\nb", "a\\b", "x" * 201,
     "a/" * 600 + "b", "\u00e9" * 101, 7, None, ["a"]],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_refused(name: object, artifact: Path) -> None:
    with pytest.raises(DicompilerError, match=r"invalid file name .*: compile the model again$") as caught:
        check_file_name(name, artifact)
    assert "\n" not in str(caught.value)
    if isinstance(name, str):
        rewrite(
            artifact / "artifact.json",
            lambda d: d["files"].update({name: {"bytes": 1, "digest": "sha256:" + "0" * 64}}),
        )
        with pytest.raises(DicompilerError, match=r"invalid file name|must|not"):
            load_artifact(artifact)


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other").name)


def linked_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.symlink_to("elsewhere")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    os.mknod(path, 0o20600, os.makedev(1, 5))  # Device number 1, 5 is /dev/zero.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (linked, "it is a link, which"),
        (linked_directory, "it is a link, which"),
        (piped, "it is not a regular file, which"),
        (device, "it is not a regular file, which"),
    ],
)
def test_files_that_are_not_plain_are_refused_before_they_are_opened(
    change: Callable[[Path], None], words: str, artifact: Path
) -> None:
    change(artifact / "b" / "manifest.json")
    with pytest.raises(DicompilerError, match=rf"{words} an artifact must not contain: compile the model again$"):
        load_artifact(artifact)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("files"), "missing key 'files'"),
        (lambda d: d.update(files=[]), "files: expected an object"),
        (lambda d: d["files"].update(x=3), "files.x: expected an object"),
        (lambda d: d.update(devices="a"), "devices: expected a list"),
        (lambda d: d.update(devices=["a/b"]), "has a character that is not allowed here"),
        (lambda d: d.update(transfers=[{"index": -1}]), "transfers"),
        (lambda d: d.update(target="x" * 300), "is too long"),
        (lambda d: d.update(digest=1), "digest: expected a text"),
        (lambda d: d.update(more=1), "unknown key 'more'"),
    ],
)
def test_fields_of_other_types_and_bounds_are_one_line(
    change: Callable[[dict[str, object]], object], words: str, artifact: Path
) -> None:
    rewrite(artifact / "artifact.json", change)
    with pytest.raises(DicompilerError) as caught:
        load_artifact(artifact)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(artifact / "artifact.json"))


def test_rejects_document_without_checksum(artifact: Path) -> None:
    (artifact / "artifact.json").write_text('{"target": "sockets"}')
    with pytest.raises(
        DicompilerError, match=r"no checksum: it is damaged, or of an earlier version: compile the model"
    ):
        load_artifact(artifact)


def test_files_are_compared_and_the_first_that_differs_is_named(artifact: Path) -> None:
    files = load_artifact(artifact)["files"]
    check_files(artifact, files, files)
    (artifact / "a" / "weights.bin").write_bytes(bytes(files["a/weights.bin"]["bytes"]))
    with pytest.raises(DicompilerError, match=r"a/weights\.bin: its content differs from the compiled one: compile"):
        check_files(artifact, files, files)
    (artifact / "a" / "weights.bin").write_bytes(b"")
    with pytest.raises(
        DicompilerError, match=r"a/weights\.bin: it has 0 bytes instead of \d+: compile the model again"
    ):
        check_files(artifact, files, files)
    (artifact / "a" / "weights.bin").unlink()
    with pytest.raises(
        DicompilerError, match=r"a/weights\.bin: no such file: compile the model again, or copy the file again$"
    ):
        check_files(artifact, files, files)
    with pytest.raises(DicompilerError, match=r"artifact\.json does not list it"):
        check_files(artifact, files, ["a/none"])


def test_second_checksum_changes_nothing(artifact: Path) -> None:
    before = (artifact / "artifact.json").read_bytes()
    write_digests_and_checksum(artifact)
    assert (artifact / "artifact.json").read_bytes() == before


def test_refuses_unknown_digests_and_artifacts_of_earlier_versions(artifact: Path) -> None:
    record = {"bytes": (artifact / "a" / "weights.bin").stat().st_size, "digest": "md5:0"}
    with pytest.raises(DicompilerError, match=r"a/weights\.bin: its digest is of the unknown type 'md5'"):
        check_files(artifact, {"a/weights.bin": record}, ["a/weights.bin"])
    with pytest.raises(ValueError, match=r"file weights\.bin: this runtime does not know the digest 'md5': copy the"):
        FileIntegrity(artifact / "a", {"files": {"weights.bin": record}}).begin_digests()
    old = {"bytes": record["bytes"], "sha256": "0" * 64}
    rewrite(
        artifact / "artifact.json", lambda d: d.update(format="dicompiler.artifact/1", files={"a/weights.bin": old})
    )
    with pytest.raises(
        DicompilerError,
        match=r"format dicompiler\.artifact/1 is not supported .*: compile the model again with 'dicompiler compile'$",
    ):
        load_artifact(artifact)
