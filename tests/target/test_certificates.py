"""Keys of a cluster: they are created as a whole or not at all, kept, and readable only by their owner."""

from __future__ import annotations

import datetime
import re
import shutil
import stat
from pathlib import Path

import pytest
from cryptography import x509

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.target.remote import certificates
from dicompiler.target.remote.certificates import make_keys


def test_keys_do_not_overwrite_other_files(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("precious")
    with pytest.raises(DicompilerError, match=r"it exists and is not a directory that dicompiler wrote as set of keys"):
        make_keys(["a"], tmp_path)
    with pytest.raises(DicompilerError, match=r"its parent directory does not exist"):
        make_keys(["a"], tmp_path / "no" / "keys")
    make_keys(["a"], tmp_path / "old", days=-2)
    with pytest.raises(
        DicompilerError,
        match=r"authority: the authority's certificate has expired: .* the clock of .* says .* UTC: create all keys",
    ):
        make_keys(["a", "b"], tmp_path / "old")
    (tmp_path / "old" / "authority" / "key.pem").write_text("rubbish")
    with pytest.raises(DicompilerError, match=r"authority: cannot be used"):
        make_keys(["a", "b"], tmp_path / "old")
    shutil.rmtree(tmp_path / "old" / "authority")
    with pytest.raises(DicompilerError, match=r"authority: cannot be used"):
        make_keys(["a", "b"], tmp_path / "old")
    assert {path.name for path in tmp_path.iterdir()} == {"other", "old"}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def certificate(place: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((place / "cert.pem").read_bytes())


def test_second_creation_of_keys_adds_only_missing_keys(tmp_path: Path) -> None:
    place = tmp_path / "keys"
    assert make_keys(["a", "b"], place) == ("coordinator", "a", "b")
    before = {path: path.read_bytes() for path in place.rglob("*.pem") if path.name != "issued.pem"}
    assert make_keys(["a", "b"], place) == ()
    assert make_keys(["a", "b", "c"], place) == ("c",)
    assert {path: path.read_bytes() for path in before} == before
    assert make_keys(["a"], place, renew=True) == ("coordinator", "a")
    assert sorted(path.name for path in (place / "devices").iterdir()) == ["a"]
    assert not any(path.read_bytes() == content for path, content in before.items() if path.exists())


def test_keeps_other_files_and_reports_files_that_block_the_output(tmp_path: Path) -> None:
    place = tmp_path / "keys"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "authority").mkdir()
    (tmp_path / "mine" / "letter").write_text("precious")
    with pytest.raises(
        DicompilerError, match=r"mine: it exists and is not a directory that dicompiler wrote as set of keys"
    ):
        make_keys(["a"], tmp_path / "mine", renew=True)
    make_keys(["a"], place)
    old = {path: path.read_bytes() for path in place.rglob("*.pem")}
    (place / "letter").write_text("precious")
    (place / "devices" / "a" / "note").write_text("precious")
    (place / "link").symlink_to(tmp_path / "mine")
    (place / "empty").mkdir()
    assert make_keys(["a"], place, renew=True) == ("coordinator", "a")
    assert not any(path.read_bytes() == content for path, content in old.items())
    assert (place / "devices" / "a" / "note").read_text() == (place / "letter").read_text() == "precious"
    assert (place / "link").readlink() == tmp_path / "mine" and (place / "empty").is_dir()
    old = {path: path.read_bytes() for path in place.rglob("*.pem")}
    (place / "devices" / "b").symlink_to(tmp_path / "mine")
    with pytest.raises(DicompilerError, match=r"devices/b: dicompiler did not write it, and needs its path"):
        make_keys(["a", "b"], place, renew=True)
    assert {path: path.read_bytes() for path in place.rglob("*.pem")} == old
    assert (tmp_path / "mine" / "letter").read_text() == "precious"


def test_renewal_that_fails_leaves_the_old_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "keys"
    make_keys(["a"], place)
    old = {path: path.read_bytes() for path in place.rglob("*.pem")}

    def full(path: Path, content: bytes, left: list[int] = [4]) -> None:  # noqa: B006
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        written(path, content)

    written = certificates._write_private_file
    monkeypatch.setattr(certificates, "_write_private_file", full)
    with pytest.raises(DicompilerError, match=r"keys: it cannot be written: No space left"):
        make_keys(["a"], place, renew=True)
    assert {path: path.read_bytes() for path in place.rglob("*.pem")} == old
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def revoked(place: Path) -> set[int]:
    """Return the serial numbers in the revocation list; all ends must have the same list."""
    (content,) = {path.read_bytes() for path in place.rglob("crl.pem")}
    listed = x509.load_pem_x509_crl(content)
    key = certificate(place / "authority").public_key()
    assert listed.is_signature_valid(key)  # type: ignore[arg-type]
    return {one.serial_number for one in listed}


def test_all_certificates_of_a_revoked_device_are_on_every_ends_list(tmp_path: Path) -> None:
    place = tmp_path / "keys"
    make_keys("ab", place)
    serials = [certificate(place / "devices" / "b").serial_number]
    # The files of b are missing, but another person may have them, so this certificate must be revoked too.
    shutil.rmtree(place / "devices" / "b")
    assert make_keys("ab", place) == ("b",)
    serials.append(certificate(place / "devices" / "b").serial_number)
    assert revoked(place) == set()
    assert make_keys("ab", place, revoke=["b"]) == ()
    assert revoked(place) == {*serials}
    assert make_keys("abc", place) == ("c",) and revoked(place) == {*serials}
    a, before = certificate(place / "devices" / "a"), place.joinpath("authority", "cert.pem").read_bytes()
    assert make_keys("abc", place, revoke=["b"], renew=True) == ("b",)
    assert certificate(place / "devices" / "b").serial_number not in revoked(place)
    assert revoked(place) == {*serials}
    assert certificate(place / "devices" / "a") == a
    assert place.joinpath("authority", "cert.pem").read_bytes() == before
    assert make_keys("abc", place, renew=True) == ("coordinator", "a", "b", "c") and revoked(place) == set()
    for name in ("d", "coordinator", "dicompiler:coordinator"):
        with pytest.raises(UsageError, match=rf"device '{name}' has no keys here"):
            make_keys("abc", place, revoke=[name])


def test_list_that_another_authority_signed_is_not_carried_on(tmp_path: Path) -> None:
    make_keys("a", tmp_path / "one")
    make_keys("a", tmp_path / "two")
    shutil.copy(tmp_path / "two" / "authority" / "crl.pem", tmp_path / "one" / "authority")
    with pytest.raises(DicompilerError, match=r"crl\.pem is not signed by the authority"):
        make_keys("ab", tmp_path / "one")


def test_no_certificate_outlasts_its_authority_and_expiry_is_announced(tmp_path: Path) -> None:
    place = tmp_path / "keys"
    make_keys("a", place, days=40)
    assert certificates.describe_expiring_certificates(place) is None
    make_keys("abc", place, days=20)
    assert re.fullmatch(r".*/keys: the certificates of b, c expire on \d{4}-\d\d-\d\d: .*--renew'", notice(place))
    make_keys("abcd", place)
    end = certificate(place / "authority").not_valid_after_utc
    assert certificate(place / "devices" / "d").not_valid_after_utc == end
    make_keys("a", tmp_path / "old", days=-2)
    assert ": the certificates of a, authority, coordinator have expired on " in notice(tmp_path / "old")


def notice(place: Path) -> str:
    return certificates.describe_expiring_certificates(place) or ""


def test_all_created_files_are_private(tmp_path: Path) -> None:
    make_keys(["a"], tmp_path / "keys")
    paths = [tmp_path / "keys", *(tmp_path / "keys").rglob("*")]
    assert {mode(path) for path in paths if path.is_dir()} == {0o700}
    assert {mode(path) for path in paths if path.is_file()} == {0o600}
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_each_end_has_a_certificate_for_its_name_signed_by_the_authority(tmp_path: Path) -> None:
    place = tmp_path / "keys"
    make_keys(["a", "b"], place)
    authority = certificate(place / "authority")
    ends = {"coordinator": place / "coordinator", **{f"device:{n}": place / "devices" / n for n in "ab"}}
    for name, end in ends.items():
        own = certificate(end)
        own.verify_directly_issued_by(authority)
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"dicompiler:{name}"]
        assert (end / "ca.pem").read_bytes() == (place / "authority" / "cert.pem").read_bytes()
        assert not (end / "authority").exists()
    assert len({(end / "key.pem").read_bytes() for end in ends.values()}) == 3


def test_another_clusters_certificates_are_not_of_this_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_keys(["a"], tmp_path / name)
    authority = certificate(tmp_path / "one" / "authority")
    with pytest.raises(ValueError, match="Issuer"):
        certificate(tmp_path / "two" / "devices" / "a").verify_directly_issued_by(authority)


def test_they_are_valid_for_as_many_days_as_asked_for_and_a_little_before(tmp_path: Path) -> None:
    make_keys(["a"], tmp_path / "keys", days=10)
    own, now = certificate(tmp_path / "keys" / "devices" / "a"), datetime.datetime.now(datetime.UTC)
    assert own.not_valid_before_utc < now - datetime.timedelta(hours=23)
    assert abs(own.not_valid_after_utc - now - datetime.timedelta(days=10)) < datetime.timedelta(minutes=10)
