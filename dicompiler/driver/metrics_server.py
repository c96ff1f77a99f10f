"""Metrics of a session for Prometheus, over HTTP.

with dicompiler.MetricsServer("127.0.0.1:9464") as metrics:
    options = dicompiler.RunOptions(on_frame=metrics.record_frame, on_event=metrics.record_event)
    with dicompiler.connect("build", options) as session:
        ...
"""

from __future__ import annotations

import http.server
import ipaddress
import socket
import ssl
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self, get_args, get_type_hints

from dicompiler.base.addresses import is_ip_address, join_address, split_address
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.target.remote import COORDINATOR_DIRECTORY
from dicompiler.target.run_records import BoardState, FrameTimes, RunEvent

DEFAULT_PORT = 9464
FRAME_TIME_QUANTILES = (0.5, 0.9, 0.99)
KEPT_FRAMES = 1024
"""The quantiles of the frame times are computed from this number of last frames."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
EVENT_KINDS = get_args(get_type_hints(RunEvent)["kind"])


class MetricsServer:
    """An HTTP server from which Prometheus reads the metrics of one or several sessions.

    Attributes:
        address: HOST:PORT at which the server listens.
        url: URL of the metrics.
    """

    address: str
    url: str

    def __init__(self, address: str = "127.0.0.1:9464", insecure: bool = False, keys: str | Path | None = None) -> None:
        """Listen for HTTP requests in a thread.

        Args:
            address: HOST:PORT; port 0 means any free port. Default port: 9464.
            insecure: True to allow an address that other hosts can reach, without encryption and authentication.
            keys: Directory of the cluster's keys (`dicompiler keys`). With them, other hosts can reach the server over
                TLS if they have a certificate of the cluster.

        Raises:
            RunError: The address cannot be used, for example because another program uses the port.
            DicompilerError: The keys cannot be used.
            UsageError: The address is invalid. Or other hosts can reach the address, and neither `keys` nor `insecure`
                is given.
        """
        try:
            host, port = split_address(address)
        except ValueError as error:
            raise UsageError(f"metrics: {address!r}: {error}: give HOST:PORT, such as 127.0.0.1:9464") from None
        port = port or (0 if address.endswith(":0") else DEFAULT_PORT)
        is_local = host == "localhost" or (is_ip_address(host) and ipaddress.ip_address(host).is_loopback)
        if not is_local and not insecure and keys is None:
            raise UsageError(
                f"metrics: other hosts can reach {address!r}, and metrics are not encrypted: give the cluster's keys, "
                "use a loopback address and an ssh tunnel, or allow it (insecure)"
            )
        context = None if keys is None or is_local else _load_keys(Path(keys))
        self._lock = threading.Lock()
        self._frame_count, self._frame_seconds = 0, 0.0
        self._last_frames_s = deque[float](maxlen=KEPT_FRAMES)
        self._compute_s, self._events, self._down_count = Counter[str](), Counter[str](), 0
        self._received_bytes, self._boards = Counter[tuple[str, str]](), dict[str, BoardState]()
        try:
            self._server = _Server((host, port), self._make_handler())
        except OSError as error:
            cause = error.strerror or error
            raise RunError(f"metrics: {address!r} cannot be used ({cause}): use another port") from None
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.address = join_address(host, self._server.server_address[1])
        self.url = f"{'http' if context is None else 'https'}://{self.address}/metrics"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def record_frame(self, times: FrameTimes) -> None:
        """Add the times of a finished frame to the metrics. Pass this method as `RunOptions.on_frame`.

        Args:
            times: The times of the frame and of each device in it.
        """
        with self._lock:
            self._frame_count += 1
            self._frame_seconds += times.frame_s
            self._last_frames_s.append(times.frame_s)
            for device, seconds in times.compute_s.items():
                self._compute_s[device] += seconds  # type: ignore[assignment]
            for devices, received in times.received.items():
                self._received_bytes[devices] += received.nbytes
            self._boards |= times.boards

    def record_event(self, event: RunEvent) -> None:
        """Add an event, such as the failure of a device, to the metrics. Pass this method as `RunOptions.on_event`.

        Args:
            event: The event that the session reports.
        """
        with self._lock:
            self._events[event.kind] += 1
            if event.kind in ("failure", "takeover", "return"):
                self._down_count = len(event.down)

    @property
    def text(self) -> str:
        """The metrics in Prometheus' text format."""
        with self._lock:
            frames_s = sorted(self._last_frames_s)
            quantiles = {
                q: frames_s[min(int(q * len(frames_s)), len(frames_s) - 1)] for q in FRAME_TIME_QUANTILES if frames_s
            }
            frame_seconds = "dicompiler_frame_seconds"
            lines = [
                *_format_metric(
                    frame_seconds,
                    "summary",
                    "Seconds from sending a frame to its last output.",
                    [({"quantile": str(q)}, seconds) for q, seconds in quantiles.items()],
                ),
                f"{frame_seconds}_sum {self._frame_seconds}",
                f"{frame_seconds}_count {self._frame_count}",
                *_format_metric(
                    "dicompiler_compute_seconds_total",
                    "counter",
                    "Seconds in which a device computed.",
                    [({"device": device}, seconds) for device, seconds in sorted(self._compute_s.items())],
                ),
                *_format_metric(
                    "dicompiler_sent_bytes_total",
                    "counter",
                    "Bytes of tensors from a device to another one.",
                    [
                        ({"sender": sender, "receiver": receiver}, nbytes)
                        for (sender, receiver), nbytes in sorted(self._received_bytes.items())
                    ],
                ),
                *_format_metric(
                    "dicompiler_board_temperature_celsius",
                    "gauge",
                    "Temperature of a device's board.",
                    [
                        ({"device": device}, state.temperature_c)
                        for device, state in sorted(self._boards.items())
                        if state.temperature_c is not None
                    ],
                ),
                *_format_metric(
                    "dicompiler_board_throttled",
                    "gauge",
                    "1 if a device's board lowers its clock.",
                    [
                        ({"device": device}, int(state.throttled & 15 > 0))
                        for device, state in sorted(self._boards.items())
                        if state.throttled is not None
                    ],
                ),
                *_format_metric(
                    "dicompiler_events_total",
                    "counter",
                    "Failures, takeovers, returns, swaps and adaptations.",
                    [({"kind": kind}, self._events[kind]) for kind in EVENT_KINDS],
                ),
                *_format_metric("dicompiler_devices_down", "gauge", "Devices that are down.", [({}, self._down_count)]),
            ]
        return "".join(f"{line}\n" for line in lines)

    def _make_handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        metrics = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 10.0

            def do_GET(self) -> None:
                if PurePosixPath(self.path.partition("?")[0]) != PurePosixPath("/metrics"):
                    self.send_error(404, "only /metrics exists")
                    return
                body = metrics.text.encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Suppress the inherited method, which writes each request to stderr."""

        return Handler


class _Server(http.server.ThreadingHTTPServer):
    """An HTTP server for IPv4 and IPv6 addresses. Its threads do not keep the process alive."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


def _load_keys(keys: Path) -> ssl.SSLContext:
    """Return TLS settings for a server that accepts only clients with a certificate of the cluster."""
    directory = keys / COORDINATOR_DIRECTORY
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.verify_mode = ssl.TLSVersion.TLSv1_3, ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
        for name in ("ca.pem", "crl.pem"):
            context.load_verify_locations(directory / name)
    except OSError as error:  # Invalid keys raise ssl.SSLError, which is a subclass of OSError.
        raise DicompilerError(
            f"metrics: the keys in {directory} cannot be used ({error.strerror or error}): create them with "
            "'dicompiler keys'"
        ) from None
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


def _format_metric(name: str, kind: str, text: str, values: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    """Yield the lines of a metric in Prometheus' text format.

    Args:
        name: Name of the metric.
        kind: Its Prometheus type, such as "counter".
        text: Its description.
        values: Pairs of labels, by label name, and a value.
    """
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        pairs = ",".join(f'{label}="{_escape_label(label_value)}"' for label, label_value in labels.items())
        yield f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}"


def _escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
