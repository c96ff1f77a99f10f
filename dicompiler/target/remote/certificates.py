"""Keys and certificates of a cluster, with which devices and the coordinator prove their identities in TLS connections.

A cluster has its own certificate authority. The authority signs a certificate for the coordinator (the process that
sends frames) and for each device. Each of them has a directory with ca.pem, crl.pem (the list of revoked certificates),
cert.pem and key.pem.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dicompiler.base.atomic_output import TRACKED_LIST_NAME, atomic_directory, check_output_directory, tracked_files
from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean
from dicompiler.target.remote import (
    AUTHORITY_DIRECTORY,
    COORDINATOR_DIRECTORY,
    DEFAULT_VALIDITY_DAYS,
    DEVICES_DIRECTORY,
)

CLOCK_SKEW_ALLOWANCE = datetime.timedelta(days=1)
"""Time by which a certificate is valid before its creation, because the clocks of boards are often behind."""
EXPIRY_NOTICE_PERIOD = datetime.timedelta(days=30)
"""Users are warned about certificates that expire within this period."""
_MARKER_FILE, _DIRECTORY_NOUN = f"{AUTHORITY_DIRECTORY}/cert.pem", "set of keys"
_COORDINATOR_URI, _DEVICE_URI_PREFIX = "dicompiler:coordinator", "dicompiler:device:"


def make_keys(
    devices: Iterable[str],
    directory: Path,
    days: int = DEFAULT_VALIDITY_DAYS,
    renew: bool = False,
    revoke: Sequence[str] = (),
) -> tuple[str, ...]:
    """Create the keys and certificates that `directory` lacks for the coordinator and the named devices.

    The coordinator is the process that sends frames to the devices. The directory is replaced as a whole or not at all.

    Args:
        devices: Names of the devices.
        directory: The directory of the keys.
        days: Days for which new certificates are valid.
        renew: Create all keys again, including the authority's, so that the old keys are no longer accepted. If
            `revoke` names devices, only the keys of these devices are created again, by the same authority.
        revoke: Names of devices; their present certificates are listed in crl.pem and no longer accepted.

    Returns:
        The names of the devices with new keys, and "coordinator" if the coordinator has new keys.

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
    paths = {name: directory / name for name in tracked_files(directory)}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file() and not path.is_symlink()}


def describe_expiring_certificates(directory: Path) -> str | None:
    """Describe in one line the certificates in `directory` that have expired or soon expire; None if there are none."""
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
            # This function only warns, so an unreadable certificate is skipped. A connection that uses it reports the
            # error.
            continue
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
    """The cluster's certificate authority: its key, its certificate, and the issued and revoked certificates."""

    def __init__(
        self,
        key: ec.EllipticCurvePrivateKey,
        certificate: x509.Certificate,
        issued: list[x509.Certificate],
        revoked: x509.CertificateRevocationList | None = None,
    ) -> None:
        self._key, self._certificate, self._issued_certificates = key, certificate, issued
        self._revocation_list = self._sign_revocation_list({}) if revoked is None else revoked

    @classmethod
    def make(cls, days: int) -> _CertificateAuthority:
        key = ec.generate_private_key(ec.SECP256R1())
        # Certificates of different clusters must have different issuers, so the authority's name contains a random
        # number.
        serial = x509.random_serial_number()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dicompiler cluster {serial:x}"[:64])])
        builder = _make_certificate_builder(name, name, key, days).serial_number(serial)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_make_key_usage(sign=True), critical=True)
        return cls(key, builder.sign(key, hashes.SHA256()), [])

    @classmethod
    def load(cls, directory: Path) -> _CertificateAuthority:
        remedy = "create all keys again (--renew)"
        try:
            key = load_pem_private_key((directory / "key.pem").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((directory / "cert.pem").read_bytes())
            issued = x509.load_pem_x509_certificates((directory / "issued.pem").read_bytes())
            revoked = x509.load_pem_x509_crl((directory / "crl.pem").read_bytes())
        except (OSError, ValueError) as error:
            raise DicompilerError(f"{directory}: cannot be used: {error}: {remedy}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise DicompilerError(f"{directory}: key.pem was not created by dicompiler: {remedy}")
        now = datetime.datetime.now(datetime.UTC)
        clock = f"the clock of {socket.gethostname()} says {now:%Y-%m-%d %H:%M} UTC"
        if now > (end := certificate.not_valid_after_utc):
            cause = f"has expired: it was valid until {end:%Y-%m-%d %H:%M} UTC, and {clock}"
            raise DicompilerError(
                f"{directory}: the authority's certificate {cause}: {remedy}, or set the clock if it is wrong"
            )
        if now < (start := certificate.not_valid_before_utc):
            cause = f"is not valid yet: it is valid from {start:%Y-%m-%d %H:%M} UTC, and {clock}"
            raise DicompilerError(f"{directory}: the authority's certificate {cause}: set the clock")
        if not revoked.is_signature_valid(certificate.public_key()):  # type: ignore[arg-type]
            raise DicompilerError(f"{directory}: crl.pem is not signed by the authority: {remedy}")
        return cls(key, certificate, issued, revoked)

    def make_files(self) -> Mapping[str, bytes]:
        return {
            "cert.pem": _to_pem(self._certificate),
            "key.pem": _key_to_pem(self._key),
            "issued.pem": b"".join(map(_to_pem, self._issued_certificates)),
            "crl.pem": _to_pem(self._revocation_list),
        }

    def revoke(self, names: Iterable[str], directory: Path) -> None:
        """Revoke all certificates of the named devices. Raise UsageError for a device that has no certificate."""
        serials: dict[str, list[int]] = {}
        for certificate in self._issued_certificates:
            name = _get_certificate_uri(certificate).removeprefix(_DEVICE_URI_PREFIX)
            serials.setdefault(name, []).append(certificate.serial_number)
        serials.pop(_COORDINATOR_URI, None)
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        dates = {revoked.serial_number: revoked.revocation_date_utc for revoked in self._revocation_list}
        for name in names:
            if name not in serials:
                raise UsageError(f"{directory}: device {name!r} has no keys here{did_you_mean(name, serials)}")
            dates |= {serial: now for serial in serials[name] if serial not in dates}
        if len(dates) > len(self._revocation_list):
            self._revocation_list = self._sign_revocation_list(dates)

    def _sign_revocation_list(self, dates: Mapping[int, datetime.datetime]) -> x509.CertificateRevocationList:
        """Return a signed list of revoked certificates, given their revocation dates by serial number."""
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
        """Create a key, and a certificate for the identity `uri`. Return the content of both files by name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, uri.rpartition(":")[2][:64])])
        until = self._certificate.not_valid_after_utc
        builder = _make_certificate_builder(subject, self._certificate.subject, key, days, until)
        # Devices accept some connections and open others, so a certificate must be valid for servers and clients.
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_make_key_usage(sign=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), False)
        builder = builder.add_extension(issuer, critical=False)
        self._issued_certificates.append(builder.sign(self._key, hashes.SHA256()))
        return {"cert.pem": _to_pem(self._issued_certificates[-1]), "key.pem": _key_to_pem(key)}


def _get_certificate_uri(certificate: x509.Certificate) -> str:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return str(names.get_values_for_type(x509.UniformResourceIdentifier)[0])


def _make_certificate_builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    until: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    """Return a builder with all parts of a certificate that are common to authority, coordinator and devices.

    The certificate is valid for `days` days, but not beyond `until`. If `days` is negative, it has already expired.
    """
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    start, end = now - CLOCK_SKEW_ALLOWANCE, end if until is None else min(end, until)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.not_valid_before(min(start, end - CLOCK_SKEW_ALLOWANCE)).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _make_key_usage(sign: bool) -> x509.KeyUsage:
    """Return the usage extension for a key that signs certificates (`sign`), or for a key that secures connections."""
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not sign, key_cert_sign=sign, crl_sign=sign, **unused)


def _key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _to_pem(certificate: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _write_private_file(path: Path, content: bytes) -> None:
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
