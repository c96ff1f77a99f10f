"""TLS with certificates on both ends: accepted keys, and one-line errors with peer and cause."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from support.handmade import halo, partial
from support.running import WAIT_S, control, emit, pids, wait_until

from dicompiler.base.errors import DicompilerError, RunError
from dicompiler.target.remote import certificates
from dicompiler.target.remote.certificates import make_keys
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.executor import run_model
from dicompiler_targets.sockets import open_session
from dicompiler_targets.sockets.artifact import Manifest
from dicompiler_targets.sockets.device_connections import DeviceProcess, launch_process, local_starter
from dicompiler_targets.sockets.runtime.addresses import is_loopback
from dicompiler_targets.sockets.runtime.channel import MessageChannel
from dicompiler_targets.sockets.runtime.handshake import TOKEN_VARIABLE
from dicompiler_targets.sockets.runtime.protocol import MessageType, PeerRefused, ProtocolError
from dicompiler_targets.sockets.runtime.transport import TlsKeys, open_connection
from dicompiler_targets.sockets.target import SocketsTarget


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of a cluster with devices a, b and c."""
    directory = tmp_path_factory.mktemp("cluster") / "keys"
    assert make_keys("abc", directory) == ("coordinator", "a", "b", "c")
    return directory


def test_tls_run_computes_same_outputs(keys: Path, tmp_path: Path) -> None:
    for network in (halo(), partial(rows=50_000)):
        directory = emit(network, tmp_path / str(len(network[0].devices)))
        options = RunOptions(timeout_s=60, in_flight=3, keys=keys)
        result = SocketsTarget().run(directory, [network[2]] * 5, options)
        for outputs in result.outputs:
            assert np.array_equal(outputs["out"], run_model(network[1], network[2])["out"])


def changed(keys: Path, place: Path, change: Callable[[Path], None]) -> Path:
    """Return a copy of the keys in which the files of b were changed."""
    shutil.copytree(keys, place)
    change(place / "devices" / "b")
    return place


def expired(device: Path) -> None:
    shutil.rmtree(device)
    make_keys(["b"], device.parent.parent, days=-2)


def dated(device: Path, start_h: float, end_h: float) -> None:
    """Replace the certificate by one that is valid between two times, in hours from now."""
    old = x509.load_pem_x509_certificate((device / "cert.pem").read_bytes())
    authority = device.parents[1] / "authority"
    signer = load_pem_private_key((authority / "key.pem").read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
    builder = builder.not_valid_before(now + datetime.timedelta(hours=start_h))
    builder = builder.not_valid_after(now + datetime.timedelta(hours=end_h))
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    new = builder.sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    (device / "cert.pem").write_bytes(new.public_bytes(Encoding.PEM))


def early(device: Path) -> None:
    dated(device, 3, 48)


def foreign(device: Path) -> None:
    make_keys(["b"], device.parent.parent.with_name("foreign"))
    shutil.rmtree(device)
    shutil.copytree(device.parent.parent.with_name("foreign") / "devices" / "b", device)


def of_a(device: Path) -> None:
    shutil.rmtree(device)
    shutil.copytree(device.with_name("a"), device)


def foreign_but_trusting(device: Path) -> None:
    authority = (device / "ca.pem").read_bytes()
    foreign(device)
    (device / "ca.pem").write_bytes(authority)


def revoked(device: Path) -> None:
    make_keys("abc", device.parent.parent, revoke=["b"])


def unlisted(device: Path) -> None:
    (device / "crl.pem").unlink()


def sign_revocation_list(device: Path, key: Path, end: datetime.timedelta) -> None:
    """Return a revocation list with another expiry date, signed by `key` in the name of the cluster's authority."""
    old = x509.load_pem_x509_crl((device / "crl.pem").read_bytes())
    builder = x509.CertificateRevocationListBuilder().issuer_name(old.issuer).last_update(old.last_update_utc)
    signer = load_pem_private_key((key / "authority" / "key.pem").read_bytes(), None)
    builder = builder.next_update(datetime.datetime.now(datetime.UTC) + end)
    (device / "crl.pem").write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM))  # type: ignore[arg-type]


def forged(device: Path) -> None:
    make_keys("b", device.parent.parent.with_name("forger"))
    sign_revocation_list(device, device.parent.parent.with_name("forger"), datetime.timedelta(days=9))


def outdated(device: Path) -> None:
    sign_revocation_list(device, device.parent.parent, -datetime.timedelta(hours=1))


def missing(device: Path) -> None:
    (device / "key.pem").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message_part"),
    [
        (expired, "keys/devices/b: its certificate has expired: it was valid until "),
        (early, "keys/devices/b: its certificate is not valid yet: it is valid from "),
        (foreign, "its certificate does not belong to this cluster: create new ones"),
        (foreign_but_trusting, "keys/devices/b: its certificate does not belong to this cluster: create new"),
        (
            revoked,
            "keys/devices/b: its certificate was revoked: to trust the device again, create new ones with "
            "'dicompiler keys",
        ),
        (unlisted, "crl.pem is missing: create keys with 'dicompiler keys'"),
        (
            forged,
            "keys/devices/b: crl.pem, the list of revoked certificates, does not belong to this cluster: create new",
        ),
        (outdated, "keys/devices/b: crl.pem, the list of revoked certificates, has expired: create new ones with"),
        (of_a, "device 'b' has the certificate of 'dicompiler:device:a': give each device its own keys"),
        (missing, "key.pem is missing: create keys with 'dicompiler keys'"),
    ],
)
def test_reports_wrong_keys_in_one_line(change: Any, message_part: str, keys: Path, tmp_path: Path) -> None:
    directory = emit(halo(), tmp_path / "artifact")
    with pytest.raises(RunError) as caught:
        SocketsTarget().run(
            directory, [halo()[2]], RunOptions(timeout_s=20, keys=changed(keys, tmp_path / "keys", change))
        )
    message = str(caught.value)
    assert message.startswith("device 'b': ")
    assert message_part in message
    assert "\n" not in message
    assert pids(directory) == {}


def test_reports_device_without_keys(keys: Path, tmp_path: Path) -> None:
    directory = emit(halo(), tmp_path)
    secure, clear = local_starter(directory, RunOptions(keys=keys), 3), local_starter(directory, RunOptions(), 3)

    def start(manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
        return (clear if manifest["device"] == "b" else secure)(manifest, arguments)

    with pytest.raises(
        RunError, match=r"^device 'b': .*the coordinator refused: this end uses TLS: give keys to the other end too"
    ):
        open_session.run_artifact(directory, [halo()[2]], RunOptions(timeout_s=20, keys=keys), start)
    with pytest.raises(
        RunError, match=r"^device '[ac]': .*cannot join the coordinator: .*give keys to both ends \(--keys\)"
    ):
        open_session.run_artifact(directory, [halo()[2]], RunOptions(timeout_s=20), start)


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def meet(client: Any, server: Any) -> tuple[Any, Any]:
    """Return the greeting or error that each end of a connection gets."""
    found: list[Any] = [None, None]

    def end(number: int, connection: socket.socket, keys: Any) -> None:
        try:
            channel = MessageChannel(open_connection(connection, keys, number == 1, time.monotonic() + WAIT_S))
            channel.send_greeting(MessageType.HELLO, {"device": "x"}, time.monotonic() + WAIT_S)
            found[number] = channel.receive_greeting(time.monotonic() + WAIT_S)
        except (ProtocolError, PeerRefused, OSError) as error:
            connection.close()
            found[number] = error

    threads = [
        threading.Thread(target=end, args=(i, s, k)) for i, s, k in zip((0, 1), pair(), (client, server), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return found[0], found[1]


class AnonymousKeys(TlsKeys):
    """Keys that trust all certificates and send none."""

    def __init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._contexts = {False: context}


class UncheckedKeys(TlsKeys):
    """Keys of a manipulated device that does not check them."""

    def _check(self, directory: Path) -> float:  # noqa: ARG002
        return time.time() + 1e9


@pytest.mark.parametrize(
    ("change", "theirs", "ours"),
    [
        (expired, "its certificate has expired: ", "which has expired: "),
        (early, "its certificate is not valid yet: ", "which is not valid yet: "),
        (foreign_but_trusting, "its certificate does not belong to this", "which belongs to another cluster"),
        (revoked, "its certificate was revoked: to", "which was revoked: to"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("opens", [True, False])
def test_both_ends_report_refused_certificate(
    change: Any, theirs: str, ours: str, opens: bool, keys: Path, tmp_path: Path
) -> None:
    """The device itself has the earlier revocation list."""
    device = tmp_path / "keys" / "devices" / "b"
    shutil.copytree(keys, tmp_path / "keys")
    change(device)
    shutil.copy(keys / "devices" / "b" / "crl.pem", device)
    bad, good = UncheckedKeys(device), TlsKeys(tmp_path / "keys" / "devices" / "a")
    refused, refusing = meet(bad, good) if opens else reversed(meet(good, bad))
    assert str(refusing).startswith(theirs)
    assert isinstance(refused, PeerRefused)
    assert str(refused).startswith(f"the other end refused this end's certificate, {ours}")


CLOCK = rf"the clock of {re.escape(socket.gethostname())} says \d{{4}}-\d\d-\d\d \d\d:\d\d UTC"


def test_names_wrong_clock_of_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys were made after the time of the clock: certificates and revocation list are not valid yet."""
    monkeypatch.setattr(certificates, "CLOCK_SKEW_ALLOWANCE", datetime.timedelta(days=-3))
    make_keys("b", tmp_path / "keys")
    start = r"keys: .*/devices/b: its certificate is not valid yet: it is valid from \d{4}-\d\d-\d\d \d\d:\d\d UTC, and"
    with pytest.raises(ValueError, match=rf"^{start} {CLOCK}: set the clock, for example with NTP \('timedatectl"):
        TlsKeys(tmp_path / "keys" / "devices" / "b")
    with pytest.raises(DicompilerError, match=rf"authority's certificate is not valid yet: .* {CLOCK}: set the clock$"):
        make_keys("bc", tmp_path / "keys")


def test_names_clock_that_is_ahead(keys: Path, tmp_path: Path) -> None:
    place = changed(keys, tmp_path / "keys", lambda device: dated(device, -90, -2))
    start = r"keys: .*/devices/b: its certificate has expired: it was valid until \d{4}-\d\d-\d\d \d\d:\d\d UTC, and"
    with pytest.raises(ValueError, match=rf"^{start} {CLOCK}: create new ones .*, or if the clock is wrong, set the"):
        TlsKeys(place / "devices" / "b")


@pytest.mark.parametrize(("start_h", "end_h"), [(0.5, 48), (-48, -0.5)], ids=["clock behind", "clock ahead"])
def test_tolerates_clocks_that_differ_by_less_than_an_hour(
    start_h: float, end_h: float, keys: Path, tmp_path: Path
) -> None:
    place = changed(keys, tmp_path / "keys", lambda device: dated(device, start_h, end_h))
    client, server = meet(TlsKeys(place / "devices" / "b"), TlsKeys(keys / "devices" / "a"))
    assert client == server == {"device": "x"}


def test_warns_of_certificate_that_expires_soon(tmp_path: Path) -> None:
    make_keys("abc", tmp_path / "keys", days=9)
    assert TlsKeys(tmp_path / "keys" / "devices" / "a").expiry_notice.endswith(
        "create new ones with 'dicompiler keys' and --renew"
    )
    directory = emit(halo(), tmp_path / "artifact")
    process = launch_process(
        directory, {"device": "a"}, ["--coordinator", "127.0.0.1:9", "--keys", str(tmp_path / "keys/devices/a")]
    )
    process.send_token("")
    assert process.popen is not None and process.popen.wait(20) == 1 and process.output is not None
    said = process.output.read().decode()
    assert re.match(r"a: .*/keys/devices/a: the certificate expires on \d{4}-\d\d-\d\d: create new", said)
    process.close()


def test_rejects_client_without_certificate(keys: Path) -> None:
    client, server = meet(AnonymousKeys(), TlsKeys(keys / "coordinator"))
    assert str(server) == "the other end sent no certificate: give keys to the other end (--keys)"
    assert isinstance(client, PeerRefused)
    assert str(client) == "the other end requires a certificate: give keys to this end (--keys)"


def test_both_ends_see_identity_of_other(keys: Path) -> None:
    client, two = pair()
    lines, deadline = list[Any](), time.monotonic() + WAIT_S
    thread = threading.Thread(
        target=lambda: lines.append(open_connection(two, TlsKeys(keys / "coordinator"), True, deadline))
    )
    thread.start()
    line = open_connection(client, TlsKeys(keys / "devices" / "a"), False, deadline)
    thread.join()
    assert (line.identity, lines[0].identity) == ("dicompiler:coordinator", "dicompiler:device:a")
    line.close()
    lines[0].close()


def test_unknown_clients_do_not_disturb_tls_run(keys: Path, tmp_path: Path) -> None:
    network = halo()
    results: list[Any] = []
    options = RunOptions(timeout_s=60, keys=keys)
    run = threading.Thread(
        target=lambda: results.append(SocketsTarget().run(emit(network, tmp_path), [network[2]], options))
    )
    run.start()
    port = int(wait_until(lambda: control(tmp_path)).split(":")[1])
    for message_part in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(message_part)
    run.join(WAIT_S)
    assert len(results) == 1


def test_device_requires_keys_beyond_loopback(tmp_path: Path) -> None:
    directory = emit(partial(), tmp_path)
    document = DeviceProcess({"device": "a"})
    # The coordinator listens at an address of this host other than loopback. The device must refuse to connect there
    # before anything is sent, so no network is needed.
    with socket.create_server(("", 0)) as listener, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            host = probe.getsockname()[0]
        except OSError:
            host = "127.0.0.1"
        arguments = ["--coordinator", f"{host}:{listener.getsockname()[1]}", "--timeout", "5"]
        process = launch_process(directory, {"device": document.device}, arguments)
        assert process.popen is not None
        process.send_token("")
        if not is_loopback(host):
            assert process.popen.wait(WAIT_S) == 1
            assert f"{host} is not a loopback address and there are no keys" in str(process.describe_exit())
        process.popen.kill()
        process.popen.wait()


def test_reports_port_in_use(tmp_path: Path) -> None:
    directory = emit(partial(), tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RunError, match=rf"^{address}: cannot listen there: the port is in use: end"):
            SocketsTarget().run(directory, [partial()[2]], RunOptions(timeout_s=20, listen=address))
    with pytest.raises(DicompilerError, match=r"^run: keys: .*coordinator/ca\.pem is missing"):
        SocketsTarget().run(directory, [partial()[2]], RunOptions(timeout_s=20, keys=tmp_path))


def test_device_reports_port_in_use(tmp_path: Path) -> None:
    directory = emit(partial(), tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as coordinator, socket.create_server(("127.0.0.1", 0)) as taken:
        control, listen = (f"127.0.0.1:{one.getsockname()[1]}" for one in (coordinator, taken))
        done = subprocess.run(
            [sys.executable, "-m", "runtime", "--coordinator", control, "--listen", listen],
            cwd=directory / "a",
            env=os.environ | {TOKEN_VARIABLE: "a token"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    remedy = "end the process that uses it, or choose another port (0: any)"
    assert (done.returncode, done.stderr) == (1, f"a: {listen}: cannot listen there: the port is in use: {remedy}\n")


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", 1), ("::1", 1), ("::ffff:127.0.0.1", 1), ("10.0.0.1", 0), ("fe80::1%lo", 0)]
)
def test_recognizes_loopback_addresses(host: str, expected: int) -> None:
    assert is_loopback(host) == expected
