"""Keys of a cluster: an authority of its own, and for the coordinator and each device a certificate that it signed.

In: names of devices, a directory. Out: per end a directory with ca.pem, cert.pem and key.pem, which TLS on both ends
of every connection needs. They lie outside of an artifact, whose bytes do not depend on them.
"""

from __future__ import annotations

import datetime
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dicompiler.base.errors import DicompilerError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY = "authority"
"""The directory of the authority's own key, which never leaves the host that made it."""
COORDINATOR, DEVICES = "coordinator", "devices"
"""Where the keys of the coordinator lie, and those of the devices, each in a directory of its name."""
DAYS = 825
"""How long certificates are valid by default."""
SKEW = datetime.timedelta(days=1)
"""Certificates are valid this long before they are made: boards' clocks are often behind."""


def make(devices: Iterable[str], directory: Path, days: int = DAYS, renew: bool = False) -> tuple[str, ...]:
    """Makes the keys that `directory` lacks for the coordinator and `devices`; the names of those that were made.

    renew: makes all anew, the authority included: those of before are not accepted any more. DicompilerError where the
    directory holds something else, or its authority cannot be used. What is made appears whole or not at all.
    """
    if (
        directory.exists()
        and not (directory / AUTHORITY).is_dir()
        and (not directory.is_dir() or any(directory.iterdir()))
    ):
        raise DicompilerError(f"{directory}: it exists and holds no keys of ours: choose another place or remove it")
    if not directory.absolute().parent.is_dir():
        raise DicompilerError(f"{directory}: its parent is no directory: create it first")
    fresh = renew or not (directory / AUTHORITY).is_dir()
    wanted = [(COORDINATOR, directory / COORDINATOR, "dicompiler:coordinator")]
    wanted += [(name, directory / DEVICES / name, f"dicompiler:device:{name}") for name in devices]
    missing = [entry for entry in wanted if fresh or not entry[1].exists()]
    try:
        with tempfile.TemporaryDirectory(dir=directory.absolute().parent, prefix=f".{directory.name}.") as scratch:
            stage = Path(scratch, "new")
            signer = _Authority.make(days) if fresh else _Authority.load(directory / AUTHORITY)
            if fresh:
                signer.save(stage / AUTHORITY)
            for _, place, uri in missing:
                signer.sign(uri, stage / place.relative_to(directory), days)
            _move_in(stage, directory, fresh, [place for _, place, _ in missing])
    except OSError as error:
        raise DicompilerError(f"{directory}: keys cannot be written: {error.strerror or error}") from error
    return tuple(name for name, _, _ in missing)


def _move_in(stage: Path, directory: Path, fresh: bool, places: Iterable[Path]) -> None:
    if fresh:
        if directory.exists():
            shutil.rmtree(directory)
        stage.rename(directory)
        return
    for place in places:
        (stage / place.relative_to(directory)).rename(place)


class _Authority:
    """The cluster's authority: its key and its certificate."""

    def __init__(self, key: EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key, self._certificate = key, certificate

    @classmethod
    def make(cls, days: int) -> _Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import NameOID

        key = _new_key()
        # A name of its own: certificates of another cluster are then told from these by name already.
        serial = x509.random_serial_number()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dicompiler cluster {serial:x}"[:64])])
        builder = _builder(name, name, key, days).serial_number(serial)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(sign=True), critical=True)
        return cls(key, builder.sign(key, hashes.SHA256()))

    @classmethod
    def load(cls, directory: Path) -> _Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key((directory / "key.pem").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((directory / "cert.pem").read_bytes())
        except (OSError, ValueError) as error:
            raise DicompilerError(f"{directory}: cannot be used: {error}: make all keys anew (--renew)") from None
        if not isinstance(key, EllipticCurvePrivateKey):
            raise DicompilerError(f"{directory}: its key is not one of ours: make all keys anew (--renew)")
        if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
            raise DicompilerError(f"{directory}: its certificate has expired: make all keys anew (--renew)")
        return cls(key, certificate)

    def save(self, directory: Path) -> None:
        _write(directory, "cert.pem", _pem(self._certificate))
        _write(directory, "key.pem", _private(self._key))

    def sign(self, uri: str, directory: Path, days: int) -> None:
        """Makes the keys of one end, whose certificate bears the name `uri`."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        key = _new_key()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, uri.rpartition(":")[2][:64])])
        builder = _builder(subject, self._certificate.subject, key, days)
        # Devices are the accepting end of one connection and the opening end of another.
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(sign=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), False)
        builder = builder.add_extension(issuer, critical=False)
        _write(directory, "ca.pem", _pem(self._certificate))
        _write(directory, "cert.pem", _pem(builder.sign(self._key, hashes.SHA256())))
        _write(directory, "key.pem", _private(key))


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _builder(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    """What all certificates have, without a serial number. Valid for `days` from now; a negative number: expired."""
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    start, end = now - SKEW, now + datetime.timedelta(days=days)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.not_valid_before(min(start, end - SKEW)).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _usage(sign: bool) -> x509.KeyUsage:
    """What a key is for: signing certificates, or connections."""
    from cryptography import x509

    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    nothing = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not sign, key_cert_sign=sign, crl_sign=sign, **nothing)


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(directory: Path, name: str, content: bytes) -> None:
    """A file that only its owner can read."""
    for place in (*reversed(directory.parents), directory):
        if not place.exists():
            place.mkdir(mode=0o700)
    with os.fdopen(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
