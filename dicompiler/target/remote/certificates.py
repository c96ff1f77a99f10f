"""Keys and certificates of a cluster.

A cluster has a certificate authority of its own. It signs a certificate for the coordinator and one for each device.
Each of them gets a directory with ca.pem, crl.pem (revoked certificates), cert.pem and key.pem, which TLS needs on both
sides of every connection. The keys are kept outside of artifacts, so that artifacts do not depend on them.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dicompiler.base.atomic_output import TRACKED_LIST_NAME, atomic_directory, check_output_directory, tracked_files
from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DIRECTORY = "authority"
"""Directory of the authority's own key, which never leaves the host where it was created."""
COORDINATOR_DIRECTORY, DEVICES_DIRECTORY = "coordinator", "devices"
"""Directory of the coordinator's keys, and parent of the devices' directories, which have the devices' names."""
DEFAULT_VALIDITY_DAYS, MAX_VALIDITY_DAYS = 825, 36_500
CLOCK_SKEW_ALLOWANCE = datetime.timedelta(days=1)
"""Certificates are valid from this long before they are created, because clocks of boards are often behind."""
EXPIRY_NOTICE_PERIOD = datetime.timedelta(days=30)
"""Certificates that expire within this period are reported."""
_MARKER_FILE, _DIRECTORY_NOUN = f"{AUTHORITY_DIRECTORY}/cert.pem", "set of keys"
_COORDINATOR_URI, _DEVICE_URI_PREFIX = "dicompiler:coordinator", "dicompiler:device:"


def make_keys(
    devices: Iterable[str],
    directory: Path,
    days: int = DEFAULT_VALIDITY_DAYS,
    renew: bool = False,
    revoke: Sequence[str] = (),
) -> tuple[str, ...]:
    """Create the keys that a directory lacks for the coordinator and the devices.

    The directory is replaced as a whole or not at all. Other files in it are kept.

    Args:
        devices: Names of the devices.
        directory: The directory of the keys.
        days: Validity of the certificates in days.
        renew: Whether to create all keys again, including the authority's. The old ones are no longer accepted. With
            `revoke`, only the keys of these devices are created again, by the same authority.
        revoke: Devices with certificates that are no longer accepted with the new crl.pem.

    Returns:
        Names of the coordinator and devices with new keys.

    Raises:
        DicompilerError: The directory contains something else, or its authority cannot be used.
        UsageError: A device in `revoke` has no keys.
    """
    check_output_directory(directory, _MARKER_FILE, _DIRECTORY_NOUN)
    revoked = {f"{DEVICES_DIRECTORY}/{name}" for name in revoke}
    is_new = not (directory / TRACKED_LIST_NAME).is_file() or (renew and not revoked)
    files = {} if is_new else _read_own_files(directory)
    authority = (
        _CertificateAuthority.make(days) if is_new else _CertificateAuthority.load(directory / AUTHORITY_DIRECTORY)
    )
    if revoked:
        authority.revoke(revoke, directory)
    uris = {
        COORDINATOR_DIRECTORY: _COORDINATOR_URI,
        **{f"{DEVICES_DIRECTORY}/{name}": _DEVICE_URI_PREFIX + name for name in devices},
    }
    created = [
        owner
        for owner in uris
        if (renew and owner in revoked) or not all(f"{owner}/{name}" in files for name in ("cert.pem", "key.pem"))
    ]
    for owner in created:
        files |= {f"{owner}/{name}": content for name, content in authority.sign(uris[owner], days).items()}
    files |= {f"{AUTHORITY_DIRECTORY}/{name}": content for name, content in authority.make_files().items()}
    for owner in {name.rpartition("/")[0] for name in files} - {AUTHORITY_DIRECTORY}:
        files |= {f"{owner}/ca.pem": files[_MARKER_FILE], f"{owner}/crl.pem": files[f"{AUTHORITY_DIRECTORY}/crl.pem"]}
    with atomic_directory(directory, _MARKER_FILE, _DIRECTORY_NOUN) as stage:
        stage.chmod(0o700)
        for name, content in files.items():
            _write_private_file(stage / name, content)
    return tuple(owner.rpartition("/")[2] for owner in created)


def _read_own_files(directory: Path) -> dict[str, bytes]:
    """Return the files that `make_keys` has written, by relative path."""
    paths = {name: directory / name for name in tracked_files(directory)}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file() and not path.is_symlink()}


def describe_expiring_certificates(directory: Path) -> str | None:
    """Describe the certificates that expire within EXPIRY_NOTICE_PERIOD, or have expired.

    Args:
        directory: The directory of the keys.

    Returns:
        One line, or None if there are no such certificates.
    """
    from cryptography import x509

    certificate_files = (
        directory / _MARKER_FILE,
        directory / COORDINATOR_DIRECTORY / "cert.pem",
        *directory.glob(f"{DEVICES_DIRECTORY}/*/cert.pem"),
    )
    ends: dict[str, datetime.datetime] = {}
    for path in certificate_files:
        try:
            ends[path.parent.name] = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
        except (OSError, ValueError):
            continue  # an unusable certificate is reported when it is used
    now = datetime.datetime.now(datetime.UTC)
    expiring = sorted(name for name, end in ends.items() if end < now + EXPIRY_NOTICE_PERIOD)
    if not expiring:
        return None
    first_end = min(ends[name] for name in expiring)
    if len(expiring) == 1:
        noun, past, future = "certificate", "has expired", "expires"
    else:
        noun, past, future = "certificates", "have expired", "expire"
    return (
        f"{directory}: the {noun} of {', '.join(expiring)} {past if first_end < now else future} on "
        f"{first_end:%Y-%m-%d}: create all keys again with 'dicompiler keys DIR -o {directory} --renew'"
    )


class _CertificateAuthority:
    """The cluster's authority: its key, its certificate, the certificates that it has issued, and those revoked."""

    def __init__(
        self,
        key: EllipticCurvePrivateKey,
        certificate: x509.Certificate,
        issued: list[x509.Certificate],
        revoked: x509.CertificateRevocationList | None = None,
    ) -> None:
        self._key, self._certificate, self._issued_certificates = key, certificate, issued
        self._revocation_list = self._sign_revocation_list({}) if revoked is None else revoked

    @classmethod
    def make(cls, days: int) -> _CertificateAuthority:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import NameOID

        key = _make_key()
        # The name contains a random number, so that certificates of different clusters have different issuers.
        serial = x509.random_serial_number()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dicompiler cluster {serial:x}"[:64])])
        builder = _make_certificate_builder(name, name, key, days).serial_number(serial)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_make_key_usage(sign=True), critical=True)
        return cls(key, builder.sign(key, hashes.SHA256()), [])

    @classmethod
    def load(cls, directory: Path) -> _CertificateAuthority:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        remedy = "create all keys again (--renew)"
        try:
            key = load_pem_private_key((directory / "key.pem").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((directory / "cert.pem").read_bytes())
            issued = x509.load_pem_x509_certificates((directory / "issued.pem").read_bytes())
            revoked = x509.load_pem_x509_crl((directory / "crl.pem").read_bytes())
        except (OSError, ValueError) as error:
            raise DicompilerError(f"{directory}: cannot be used: {error}: {remedy}") from None
        if not isinstance(key, EllipticCurvePrivateKey):
            raise DicompilerError(f"{directory}: its key was not created by dicompiler: {remedy}")
        if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
            raise DicompilerError(f"{directory}: its certificate has expired: {remedy}")
        if not revoked.is_signature_valid(certificate.public_key()):  # type: ignore[arg-type]
            raise DicompilerError(f"{directory}: its crl.pem is not signed by it: {remedy}")
        return cls(key, certificate, issued, revoked)

    def make_files(self) -> Mapping[str, bytes]:
        """Return the files that store the authority, by name."""
        issued = b"".join(map(_to_pem, self._issued_certificates))
        certificate, revoked = _to_pem(self._certificate), _to_pem(self._revocation_list)
        return {
            "cert.pem": certificate,
            "key.pem": _private_key_to_pem(self._key),
            "issued.pem": issued,
            "crl.pem": revoked,
        }

    def revoke(self, names: Iterable[str], directory: Path) -> None:
        """Revoke all certificates of these devices. Raise UsageError for a device that has none."""
        known: dict[str, list[int]] = {}
        for certificate in self._issued_certificates:
            name = _get_certificate_uri(certificate).removeprefix(_DEVICE_URI_PREFIX)
            known.setdefault(name, []).append(certificate.serial_number)
        known.pop(_COORDINATOR_URI, None)
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        dates = {revoked.serial_number: revoked.revocation_date_utc for revoked in self._revocation_list}
        for name in names:
            if name not in known:
                raise UsageError(f"{directory}: device {name!r} has no keys here{did_you_mean(name, known)}")
            dates |= {serial: now for serial in known[name] if serial not in dates}
        if len(dates) > len(self._revocation_list):
            self._revocation_list = self._sign_revocation_list(dates)

    def _sign_revocation_list(self, dates: Mapping[int, datetime.datetime]) -> x509.CertificateRevocationList:
        """Return the signed list of revoked serial numbers. It is valid as long as the authority itself."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        start, end = self._certificate.not_valid_before_utc, self._certificate.not_valid_after_utc
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._certificate.subject)
        builder = builder.last_update(start).next_update(end)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False).add_extension(x509.CRLNumber(len(dates) + 1), False)
        for serial, date in dates.items():
            revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(date)
            builder = builder.add_revoked_certificate(revoked.build())
        return builder.sign(self._key, hashes.SHA256())

    def sign(self, uri: str, days: int) -> Mapping[str, bytes]:
        """Return a new key and a certificate for the name `uri`, as files by name."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        key = _make_key()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, uri.rpartition(":")[2][:64])])
        until = self._certificate.not_valid_after_utc
        builder = _make_certificate_builder(subject, self._certificate.subject, key, days, until)
        # A device accepts some connections and opens others, so its certificate serves for both.
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_make_key_usage(sign=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), False)
        builder = builder.add_extension(issuer, critical=False)
        self._issued_certificates.append(builder.sign(self._key, hashes.SHA256()))
        return {"cert.pem": _to_pem(self._issued_certificates[-1]), "key.pem": _private_key_to_pem(key)}


def _get_certificate_uri(certificate: x509.Certificate) -> str:
    from cryptography import x509

    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return str(names.get_values_for_type(x509.UniformResourceIdentifier)[0])


def _make_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _make_certificate_builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: EllipticCurvePrivateKey,
    days: int,
    until: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    """Return a builder with the parts that all certificates have, except for a serial number.

    Args:
        subject: Name of the key's owner.
        issuer: Name of the authority.
        key: The owner's key.
        days: Validity in days from now; a negative number makes an expired certificate.
        until: Latest end of the validity.
    """
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    start, end = now - CLOCK_SKEW_ALLOWANCE, end if until is None else min(end, until)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.not_valid_before(min(start, end - CLOCK_SKEW_ALLOWANCE)).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _make_key_usage(sign: bool) -> x509.KeyUsage:
    """Return the usage of a key that signs certificates, or of one that secures connections."""
    from cryptography import x509

    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not sign, key_cert_sign=sign, crl_sign=sign, **unused)


def _to_pem(certificate: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private_key_to_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_private_file(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
