"""Keys of a cluster: made whole or not at all, kept, readable by their owner alone."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path

import pytest
from cryptography import x509

from dicompiler.base.errors import DicompilerError
from dicompiler.target.remote.certificates import make


def test_keys_do_not_overwrite_what_is_not_theirs(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("precious")
    with pytest.raises(DicompilerError, match=r"it exists and holds no keys of ours"):
        make(["a"], tmp_path)
    with pytest.raises(DicompilerError, match=r"its parent is no directory"):
        make(["a"], tmp_path / "no" / "keys")
    make(["a"], tmp_path / "old", days=-2)
    with pytest.raises(DicompilerError, match=r"authority: its certificate has expired: make all keys anew"):
        make(["a", "b"], tmp_path / "old")
    (tmp_path / "old" / "authority" / "key.pem").write_text("rubbish")
    with pytest.raises(DicompilerError, match=r"authority: cannot be used"):
        make(["a", "b"], tmp_path / "old")
    assert {path.name for path in tmp_path.iterdir()} == {"other", "old"}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def certificate(place: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((place / "cert.pem").read_bytes())


def test_keys_made_twice_stay_as_they_are_and_only_what_is_missing_is_made(tmp_path: Path) -> None:
    place = tmp_path / "keys"
    assert make(["a", "b"], place) == ("coordinator", "a", "b")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert make(["a", "b"], place) == ()
    assert make(["a", "b", "c"], place) == ("c",)
    assert {path: path.read_bytes() for path in before} == before
    assert make(["a"], place, renew=True) == ("coordinator", "a")
    assert sorted(path.name for path in (place / "devices").iterdir()) == ["a"]
    assert not any(path.read_bytes() == before[path] for path in place.rglob("*.pem"))


def test_all_that_is_made_is_its_owners_alone(tmp_path: Path) -> None:
    make(["a"], tmp_path / "keys")
    paths = [tmp_path / "keys", *(tmp_path / "keys").rglob("*")]
    assert {mode(path) for path in paths if path.is_dir()} == {0o700}
    assert {mode(path) for path in paths if path.is_file()} == {0o600}
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_each_end_has_a_certificate_of_its_own_name_signed_by_the_one_authority(tmp_path: Path) -> None:
    place = tmp_path / "keys"
    make(["a", "b"], place)
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
        make(["a"], tmp_path / name)
    authority = certificate(tmp_path / "one" / "authority")
    with pytest.raises(ValueError, match="Issuer"):
        certificate(tmp_path / "two" / "devices" / "a").verify_directly_issued_by(authority)


def test_they_are_valid_for_as_many_days_as_asked_for_and_a_little_before(tmp_path: Path) -> None:
    make(["a"], tmp_path / "keys", days=10)
    own, now = certificate(tmp_path / "keys" / "devices" / "a"), datetime.datetime.now(datetime.UTC)
    assert own.not_valid_before_utc < now - datetime.timedelta(hours=23)
    assert abs(own.not_valid_after_utc - now - datetime.timedelta(days=10)) < datetime.timedelta(minutes=10)
