"""Keys of a cluster: an authority of its own, and for the coordinator and each device a certificate that it signed.

In: names of devices, a directory. Out: per end a directory with ca.pem, crl.pem (what the authority has revoked),
cert.pem and key.pem, which TLS on both ends of every connection needs. They lie outside of an artifact, whose bytes do
not depend on them.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dicompiler.base import atomic_output
from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DIRECTORY = "authority"
"""The directory of the authority's own key, which never leaves the host that made it."""
COORDINATOR_DIRECTORY, DEVICES_DIRECTORY = "coordinator", "devices"
"""Where the keys of the coordinator lie, and those of the devices, each in a directory of its name."""
DEFAULT_VALIDITY_DAYS, MAX_VALIDITY_DAYS = 825, 36_500
"""How long certificates are valid by default, and at most."""
CLOCK_SKEW_ALLOWANCE = datetime.timedelta(days=1)
"""Certificates are valid this long before they are made: boards' clocks are often behind."""
EXPIRY_NOTICE_PERIOD = datetime.timedelta(days=30)
"""How long before a certificate expires it is told."""
_MARKER_FILE, _DIRECTORY_NOUN = f"{AUTHORITY_DIRECTORY}/cert.pem", "set of keys"
_COORDINATOR_URI, _DEVICE_URI_PREFIX = "dicompiler:coordinator", "dicompiler:device:"


def make_keys(
    devices: Iterable[str],
    directory: Path,
    days: int = DEFAULT_VALIDITY_DAYS,
    renew: bool = False,
    revoke: Sequence[str] = (),
) -> tuple[str, ...]:
    """Makes the keys that `directory` lacks for the coordinator and `devices`; the names of those that were made.

    renew: makes all anew, the authority included: those of before are not accepted any more. revoke: devices none of
    whose certificates is accepted any more by who has the new crl.pem; with `renew` only these are made anew, by the
    same authority. DicompilerError where the directory holds something else, or its authority cannot be used. The set
    changes as a whole or not at all, and what else lies in the directory stays.
    """
    atomic_output.check_output_directory(directory, _MARKER_FILE, _DIRECTORY_NOUN)
    lost = {f"{DEVICES_DIRECTORY}/{name}" for name in revoke}
    fresh = not (directory / atomic_output.TRACKED_LIST_NAME).is_file() or (renew and not lost)
    files = {} if fresh else _read_own_files(directory)
    authority = (
        _CertificateAuthority.make(days) if fresh else _CertificateAuthority.load(directory / AUTHORITY_DIRECTORY)
    )
    if lost:
        authority.revoke(revoke, directory)
    wanted = {
        COORDINATOR_DIRECTORY: _COORDINATOR_URI,
        **{f"{DEVICES_DIRECTORY}/{name}": _DEVICE_URI_PREFIX + name for name in devices},
    }
    made = [
        end
        for end in wanted
        if (renew and end in lost) or not all(f"{end}/{name}" in files for name in ("cert.pem", "key.pem"))
    ]
    for end in made:
        files |= {f"{end}/{name}": content for name, content in authority.sign(wanted[end], days).items()}
    files |= {f"{AUTHORITY_DIRECTORY}/{name}": content for name, content in authority.make_files().items()}
    for end in {name.rpartition("/")[0] for name in files} - {AUTHORITY_DIRECTORY}:
        files |= {f"{end}/ca.pem": files[_MARKER_FILE], f"{end}/crl.pem": files[f"{AUTHORITY_DIRECTORY}/crl.pem"]}
    with atomic_output.atomic_directory(directory, _MARKER_FILE, _DIRECTORY_NOUN) as stage:
        stage.chmod(0o700)
        for name, content in files.items():
            _write_private_file(stage / name, content)
    return tuple(end.rpartition("/")[2] for end in made)


def _read_own_files(directory: Path) -> dict[str, bytes]:
    """What is there of the files that we made, by relative path."""
    paths = {name: directory / name for name in atomic_output.tracked_files(directory)}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file() and not path.is_symlink()}


def describe_expiring_certificates(directory: Path) -> str | None:
    """The line that tells which certificates in a directory of keys expire within NOTICE, or have; None: none does."""
    from cryptography import x509

    ends: dict[str, datetime.datetime] = {}
    for path in (
        directory / _MARKER_FILE,
        directory / COORDINATOR_DIRECTORY / "cert.pem",
        *directory.glob(f"{DEVICES_DIRECTORY}/*/cert.pem"),
    ):
        try:
            ends[path.parent.name] = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
        except (OSError, ValueError):
            continue  # whoever needs it says so
    soon = sorted(
        name for name, end in ends.items() if end < datetime.datetime.now(datetime.UTC) + EXPIRY_NOTICE_PERIOD
    )
    if not soon:
        return None
    first = min(ends[name] for name in soon)
    one = len(soon) == 1
    past, future = ("has expired", "expires") if one else ("have expired", "expire")
    word = past if first < datetime.datetime.now(datetime.UTC) else future
    return (
        f"{directory}: the certificate{'' if one else 's'} of {', '.join(soon)} {word} on {first:%Y-%m-%d}: "
        f"make all anew with 'dicompiler keys DIR -o {directory} --renew'"
    )


class _CertificateAuthority:
    """The cluster's authority: its key, its certificate, the certificates that it has issued, and what it revoked."""

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
        # A name of its own: certificates of another cluster are then told from these by name already.
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

        try:
            key = load_pem_private_key((directory / "key.pem").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((directory / "cert.pem").read_bytes())
            issued = x509.load_pem_x509_certificates((directory / "issued.pem").read_bytes())
            revoked = x509.load_pem_x509_crl((directory / "crl.pem").read_bytes())
        except (OSError, ValueError) as error:
            raise DicompilerError(f"{directory}: cannot be used: {error}: make all keys anew (--renew)") from None
        if not isinstance(key, EllipticCurvePrivateKey):
            raise DicompilerError(f"{directory}: its key is not one of ours: make all keys anew (--renew)")
        if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
            raise DicompilerError(f"{directory}: its certificate has expired: make all keys anew (--renew)")
        if not revoked.is_signature_valid(certificate.public_key()):  # type: ignore[arg-type]
            raise DicompilerError(f"{directory}: its crl.pem is not its own: make all keys anew (--renew)")
        return cls(key, certificate, issued, revoked)

    def make_files(self) -> Mapping[str, bytes]:
        """What is kept of it, by name."""
        issued = b"".join(map(_to_pem, self._issued_certificates))
        own, revoked = _to_pem(self._certificate), _to_pem(self._revocation_list)
        return {"cert.pem": own, "key.pem": _private_key_to_pem(self._key), "issued.pem": issued, "crl.pem": revoked}

    def revoke(self, names: Iterable[str], place: Path) -> None:
        """Revokes all certificates of these devices. UsageError for a device that has none."""
        known: dict[str, list[int]] = {}
        for certificate in self._issued_certificates:
            known.setdefault(_get_certificate_uri(certificate).removeprefix(_DEVICE_URI_PREFIX), []).append(
                certificate.serial_number
            )
        known.pop(_COORDINATOR_URI, None)
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        dates = {one.serial_number: one.revocation_date_utc for one in self._revocation_list}
        for name in names:
            if name not in known:
                raise UsageError(f"{place}: no device {name!r} has keys of it{did_you_mean(name, known)}")
            dates |= {serial: now for serial in known[name] if serial not in dates}
        if len(dates) > len(self._revocation_list):
            self._revocation_list = self._sign_revocation_list(dates)

    def _sign_revocation_list(self, dates: Mapping[int, datetime.datetime]) -> x509.CertificateRevocationList:
        """The signed list of revoked serial numbers. It lasts as long as the authority, so that it needs no upkeep."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        start, end = self._certificate.not_valid_before_utc, self._certificate.not_valid_after_utc
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._certificate.subject)
        builder = builder.last_update(start).next_update(end)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False).add_extension(x509.CRLNumber(len(dates) + 1), False)
        for serial, date in dates.items():
            one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(date)
            builder = builder.add_revoked_certificate(one.build())
        return builder.sign(self._key, hashes.SHA256())

    def sign(self, uri: str, days: int) -> Mapping[str, bytes]:
        """Makes the certificate, which bears the name `uri`, and the key of one end."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        key = _make_key()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, uri.rpartition(":")[2][:64])])
        builder = _make_certificate_builder(
            subject, self._certificate.subject, key, days, self._certificate.not_valid_after_utc
        )
        # Devices are the accepting end of one connection and the opening end of another.
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
    """What all certificates have, without a serial number. Valid for `days` from now, at most `until`; a negative
    number: expired."""
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    start, end = now - CLOCK_SKEW_ALLOWANCE, end if until is None else min(end, until)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.not_valid_before(min(start, end - CLOCK_SKEW_ALLOWANCE)).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _make_key_usage(sign: bool) -> x509.KeyUsage:
    """What a key is for: signing certificates, or connections."""
    from cryptography import x509

    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    nothing = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not sign, key_cert_sign=sign, crl_sign=sign, **nothing)


def _to_pem(certificate: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private_key_to_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_private_file(path: Path, content: bytes) -> None:
    """A file that only its owner can read."""
    for place in reversed(path.parents):
        if not place.exists():
            place.mkdir(mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
