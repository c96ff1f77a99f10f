"""Metrics of sessions for Prometheus."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.running import WAIT_S, pids, wait_until
from support.swapping import compile_times, frame, frames

import dicompiler
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.cli.command_line import main
from dicompiler.driver.metrics_server import MetricsServer
from dicompiler.target.run_records import BoardState, FrameTimes, ReceivedBytes, RunOptions


def read(metrics: MetricsServer, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{metrics.address}{path}", timeout=WAIT_S) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return response.read().decode()


def value(text: str, name: str) -> float:
    (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found)


def test_metrics_of_session_with_failure(tmp_path: Path) -> None:
    directory = compile_times(3, tmp_path / "a", tolerate_failures=1)
    with MetricsServer("127.0.0.1:0") as metrics:
        options = RunOptions(in_flight=4, heartbeat_s=0.3, on_frame=metrics.record_frame, on_event=metrics.record_event)
        with dicompiler.connect(directory, options) as session:
            list(session.stream(frames(20)))
            text = read(metrics)
            assert value(text, "dicompiler_frame_seconds_count") == 20
            assert value(text, "dicompiler_devices_down") == 0
            assert value(text, 'dicompiler_sent_bytes_total{sender="pi01",receiver="pi02"}') > 0
            os.kill(pids(directory)["pi02"], signal.SIGKILL)
            wait_until(lambda: session.infer(frame(1)) and value(read(metrics), "dicompiler_devices_down") == 1)
        text = read(metrics)
    assert value(text, 'dicompiler_events_total{kind="failure"}') == 1
    assert value(text, 'dicompiler_events_total{kind="swap"}') == 0
    for report in session.reports:
        if report.device != "pi02":
            name = f'dicompiler_compute_seconds_total{{device="{report.device}"}}'
            # The time in the report is longer, because it includes frames that were computed twice after the failure.
            assert 0 < value(text, name) <= report.compute_s + 1e-9
    quantiles = [value(text, f'dicompiler_frame_seconds{{quantile="{q}"}}') for q in (0.5, 0.9, 0.99)]
    assert quantiles == sorted(quantiles) and quantiles[0] > 0


def test_metrics_without_frames_and_with_unusual_names() -> None:
    with MetricsServer("127.0.0.1:0") as metrics:
        assert value(read(metrics, "/metrics?name=x"), "dicompiler_frame_seconds_count") == 0
        metrics.record_frame(FrameTimes(0.5, {'pi "1"\\': 0.25}))
        assert 'dicompiler_compute_seconds_total{device="pi \\"1\\"\\\\"} 0.25\n' in read(metrics)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(metrics, "/")


def test_metrics_of_links_and_boards() -> None:
    with MetricsServer("127.0.0.1:0") as metrics:
        boards = {"a": BoardState(61.5, 0x50005), "b": BoardState(40.0, 0x50000), "c": BoardState()}
        for _ in range(2):
            metrics.record_frame(FrameTimes(0.5, {}, 0, {("a", "b"): ReceivedBytes(100, 50, 0.1)}, boards))
        text = read(metrics)
    assert value(text, 'dicompiler_sent_bytes_total{sender="a",receiver="b"}') == 200
    assert value(text, 'dicompiler_board_temperature_celsius{device="a"}') == 61.5
    throttled = {name: value(text, f'dicompiler_board_throttled{{device="{name}"}}') for name in "ab"}
    assert throttled == {"a": 1, "b": 0} and '{device="c"}' not in text


def test_other_hosts_need_a_certificate_of_the_cluster(tmp_path: Path) -> None:
    directory = compile_times(3, tmp_path / "a")
    assert main(["keys", str(directory)]) == main(["keys", str(directory), "-o", str(tmp_path / "other.keys")]) == 0
    keys = tmp_path / "a.keys"

    def fetch(owner: Path | None) -> str:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if owner is not None:
            context.load_cert_chain(owner / "cert.pem", owner / "key.pem")
        url = f"https://127.0.0.1:{metrics.address.rpartition(':')[2]}/metrics"
        with urllib.request.urlopen(url, timeout=10, context=context) as response:
            return response.read().decode()

    with MetricsServer("0.0.0.0:0", keys=keys) as metrics:
        assert value(fetch(keys / "devices" / "pi01"), "dicompiler_devices_down") == 0
        for owner in (None, tmp_path / "other.keys" / "devices" / "pi01"):
            with pytest.raises(OSError):  # noqa: PT011  The client sees a reset, a broken pipe or a TLS alert.
                fetch(owner)
    with MetricsServer("127.0.0.1:0", keys=keys) as metrics:
        assert value(read(metrics), "dicompiler_devices_down") == 0
    with pytest.raises(DicompilerError, match=r"metrics: the keys in .*coordinator cannot be used .*'dicompiler keys'"):
        MetricsServer("0.0.0.0:0", keys=tmp_path)


def test_rejects_addresses_that_are_taken_open_or_invalid() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=rf"metrics: '127.0.0.1:{port}' cannot be used \(.*\): use another port"):
            MetricsServer(f"127.0.0.1:{port}")
    with pytest.raises(UsageError, match=r"other hosts can reach '0\.0\.0\.0:0', and metrics are not encrypted"):
        MetricsServer("0.0.0.0:0")
    with pytest.raises(UsageError, match=r"metrics: 'localhost:x': .*: give HOST:PORT"):
        MetricsServer("localhost:x")
    with MetricsServer("[::1]:0") as metrics:
        assert value(read(metrics), "dicompiler_devices_down") == 0
    with MetricsServer("0.0.0.0:0", insecure=True) as metrics:
        assert metrics.address.startswith("0.0.0.0:")
    with MetricsServer("127.0.0.2") as metrics:
        assert metrics.url == "http://127.0.0.2:9464/metrics"
