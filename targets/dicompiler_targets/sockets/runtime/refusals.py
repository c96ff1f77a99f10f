"""Why a connection in TLS fails, in words that say what to do.

In: errors of the TLS library. Out: what this end refuses (ProtocolError), or the other one (Refused).
"""

from __future__ import annotations

import ssl

from .protocol import PeerRefused, ProtocolError

RENEW_HINT = "make new ones with 'dicompiler keys'"
RENEW_REVOKED_HINT = "if the device is to be trusted again, 'dicompiler keys' with --revoke and --renew makes new ones"


def tls_error(error: ssl.SSLError) -> Exception:
    """The error in words; Refused where the other end sent it, as an alert."""
    code, cause = getattr(error, "verify_code", 0), str(error.reason)
    if isinstance(error, ssl.SSLCertVerificationError):
        if code == 10:
            return ProtocolError(f"its certificate has expired: {RENEW_HINT}")
        if code == 9:
            return ProtocolError("its certificate is not valid yet: compare the clocks of both hosts")
        if code == 23:
            return ProtocolError(f"its certificate was revoked: {RENEW_REVOKED_HINT}")
        if code in (3, 8, 11, 12):
            what = "has expired" if code == 12 else "is not one of this cluster"
            return ProtocolError(f"crl.pem, the list of revoked certificates, {what}: {RENEW_HINT}")
        return ProtocolError(f"its certificate is not one of this cluster: {RENEW_HINT}")
    if cause == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return ProtocolError("it shows no certificate: give it keys (--keys)")
    if "ALERT" not in cause:
        return ProtocolError(f"it does not speak TLS as expected ({cause}): give both of them keys (--keys)")
    if "CERTIFICATE_REQUIRED" in cause:
        return PeerRefused("it wants a certificate and was shown none: give this end keys (--keys)")
    if "CERTIFICATE_EXPIRED" in cause:
        return PeerRefused(f"it refuses the certificate of this end, which has expired: {RENEW_HINT}")
    if "CERTIFICATE_REVOKED" in cause:
        return PeerRefused(f"it refuses the certificate of this end, which was revoked: {RENEW_REVOKED_HINT}")
    if "UNKNOWN_CA" in cause or "DECRYPT_ERROR" in cause:
        return PeerRefused(f"it refuses the certificate of this end, which is not one of its cluster: {RENEW_HINT}")
    return PeerRefused(f"it refuses the TLS connection ({cause}): {RENEW_HINT}")
