"""The period in which a certificate is valid, compared with the clock of this host.

Many boards have no battery for their clock, so a wrong clock is as likely as an expired certificate. OpenSSL's error
message names neither the clock's time nor the dates, and OpenSSL tolerates no difference between clocks. Therefore
`describe_wrong_date` checks the dates, and OpenSSL does not (`NO_CHECK_TIME`).
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

NO_CHECK_TIME = 0x200000
"""OpenSSL's flag X509_V_FLAG_NO_CHECK_TIME, for which Python has no name."""
CLOCK_TOLERANCE_S = 3600.0
"""Seconds by which clocks of hosts may differ."""
RENEW_HINT = "create new ones with 'dicompiler keys'"
CLOCK_HINT = "set the clock, for example with NTP ('timedatectl set-ntp true')"


def describe_wrong_date(certificate: dict[str, Any]) -> str:
    """Return why the certificate is not valid at the present time, and the remedy; '' if it is valid.

    `certificate` is a result of `SSLObject.getpeercert`.
    """
    now = time.time()
    start, end = (float(ssl.cert_time_to_seconds(certificate[key])) for key in ("notBefore", "notAfter"))
    clock = f"the clock of {socket.gethostname()} says {_format_time(now)}"
    if now < start - CLOCK_TOLERANCE_S:
        return f"is not valid yet: it is valid from {_format_time(start)}, and {clock}: {CLOCK_HINT}"
    if now > end + CLOCK_TOLERANCE_S:
        remedy = f"{RENEW_HINT}, or if the clock is wrong, {CLOCK_HINT}"
        return f"has expired: it was valid until {_format_time(end)}, and {clock}: {remedy}"
    return ""


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
