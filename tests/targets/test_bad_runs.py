"""Failures of runs, as the command line reports them: one line with device and cause, and exit code 1.

No output file and no process is left. NaN and infinity are not failures, in any kind of split.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.refusing import Refused, image, network
from support.running import pids, wait_until
from support.tampering import reseal

from dicompiler.cli import main
from dicompiler.ir.onnx.model import Model
from dicompiler.target.remote.certificates import make_keys
from dicompiler.verify.executor import run_model
from dicompiler_targets.sockets import artifact as sockets_artifact
from dicompiler_targets.sockets import device_connections
from dicompiler_targets.sockets.runtime.protocol import PROTOCOL_VERSION


def compiled(place: Path, seed: int = 7) -> Path:
    """Compile an artifact in `place` for pi01 and pi02, which both compute."""
    place.mkdir(exist_ok=True)
    onnx.save(network(seed), place / "model.onnx")
    command = ["compile", str(place / "model.onnx"), "--platform", "rpi4x2", "--strategy", "modnn"]
    assert main([*command, "-o", str(place / "artifact")]) == 0
    return place / "artifact"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    """Return a copy that a test can change."""
    return Path(shutil.copytree(made, tmp_path / "artifact"))


class Failing:
    """Runs an artifact that must fail."""

    def __init__(self, place: Path, refused: Refused) -> None:
        self.place, self.refused = place, refused

    def __call__(self, artifact: Path, *options: object) -> str:
        """Return the error line, after checking that no process and no output is left."""
        line = self.refused(1, "run", artifact, "--outputs", self.place / "y.npz", "--timeout", "60", *options)
        assert pids(artifact) == {}
        return line


@pytest.fixture
def failing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Failing:
    return Failing(tmp_path, Refused(tmp_path, capsys))


@pytest.fixture
def tamper(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Return a function that changes `old` to `new` in a file of pi02's runtime.

    Devices are then started with the runtime in their directory, as users start them on boards.
    """

    def change(file: str, old: str, new: str) -> None:
        path = artifact / "pi02" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        reseal(artifact)
        monkeypatch.setattr(device_connections, "RUNTIME_COMMAND", ("-m", "runtime"))
        # Bytecode would be another file in the artifact.
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        monkeypatch.setattr(sockets_artifact, "check_bundled_sources", lambda *_: None)

    return change


def test_reports_busy_port(artifact: Path, failing: Failing) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = failing(artifact, "--listen", address)
    cause = f"{address}: cannot listen there: the port is in use"
    assert line == f"{cause}: end the process that uses it, or choose another port (0: any) (--listen)"


def expired(keys: Path) -> None:
    shutil.rmtree(keys / "devices" / "pi02")
    make_keys(["pi02"], keys, days=-2)


def foreign(keys: Path) -> None:
    other = keys.with_name("other")
    make_keys(["pi02"], other)
    shutil.rmtree(keys / "devices" / "pi02")
    shutil.move(other / "devices" / "pi02", keys / "devices" / "pi02")
    shutil.rmtree(other)


def of_another(keys: Path) -> None:
    shutil.rmtree(keys / "devices" / "pi02")
    shutil.copytree(keys / "devices" / "pi01", keys / "devices" / "pi02")


def absent(keys: Path) -> None:
    shutil.rmtree(keys / "devices" / "pi02")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (expired, "its certificate has expired: it was valid until "),
        (foreign, "its certificate does not belong to this cluster: create new ones"),
        (of_another, "has the certificate of 'dicompiler:device:pi01': give each device its own keys"),
        (absent, "is missing: create keys with 'dicompiler keys'"),
    ],
)
def test_reports_wrong_expired_or_missing_certificate(
    artifact: Path, tmp_path: Path, failing: Failing, change: Callable[[Path], None], message: str
) -> None:
    keys = tmp_path / "keys"
    make_keys(["pi01", "pi02"], keys)
    change(keys)
    line = failing(artifact, "--keys", keys)
    assert line.startswith("device 'pi02': ") and message in line


def test_reports_missing_coordinator_keys(artifact: Path, tmp_path: Path, failing: Failing) -> None:
    line = failing.refused(1, "run", artifact, "--keys", tmp_path / "none", "--outputs", tmp_path / "y.npz")
    assert line == f"run: keys: {tmp_path / 'none'}/coordinator/ca.pem is missing: create keys with 'dicompiler keys'"


def test_reports_peer_of_another_version(
    artifact: Path, failing: Failing, tamper: Callable[[str, str, str], None]
) -> None:
    tamper("runtime/protocol.py", f'b"DICO", {PROTOCOL_VERSION}', f'b"DICO", {PROTOCOL_VERSION + 1}')
    line = failing(artifact)
    assert line.startswith("device 'pi02': ") and "version" in line and "protocol" in line


def test_rejects_peer_with_other_weights(artifact: Path, tmp_path: Path, failing: Failing) -> None:
    retrained = compiled(tmp_path / "retrained", seed=8)
    shutil.rmtree(artifact / "pi02")
    shutil.copytree(retrained / "pi02", artifact / "pi02")
    line = failing(artifact)
    assert line.startswith(f"{artifact}/pi02/manifest.json: ") and line.endswith(
        ": compile the model again, or copy the file again"
    )
    reseal(artifact)
    assert "the manifest of device pi02 belongs to another artifact" in failing(artifact)


WHOLE = "        queued = _QueuedMessage(header"
CUT = """        if message_type is MessageType.TENSOR and self._is_writing:
            self._connection.send([memoryview(pack_header(header)), memoryview(payload)[:9]])
            return self.close()
"""


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("protocol", "frame, header.length)\n", "frame, header.length + (header.type == 6))\n", "expected"),
        ("protocol", "header.type, 0, header", "header.type, int(header.type == 6), header", "with flags 1"),
        ("channel", WHOLE, CUT + WHOLE, "lost"),
    ],
    ids=["wrong length", "flipped bit", "truncated"],
)
def test_reports_corrupted_or_truncated_message(
    artifact: Path,
    failing: Failing,
    tamper: Callable[[str, str, str], None],
    file: str,
    old: str,
    new: str,
    message: str,
) -> None:
    tamper(f"runtime/{file}.py", old, new)
    line = failing(artifact)
    assert line.startswith("device 'pi0") and "pi02" in line and message in line


@pytest.mark.parametrize(
    ("sign", "message"),
    [
        (signal.SIGKILL, r"its process was ended by signal 9 \(SIGKILL\)"),
        # The coordinator and pi01 wait for pi02 equally long, so either may report the failure first.
        pytest.param(
            signal.SIGSTOP,
            r"(device 'pi01' reports: the connection to 'pi02' was lost: )?no data received for 6 s",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["killed", "stopped"],
)
def test_names_killed_or_stopped_process(artifact: Path, failing: Failing, sign: signal.Signals, message: str) -> None:
    def strike() -> None:
        pid = wait_until(lambda: pids(artifact).get("pi02"))
        # The command line contains the path of the device's manifest, by which users find the process.
        manifest = str(artifact / "pi02" / "manifest.json")
        assert wait_until(lambda: manifest in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        time.sleep(1.5)
        os.kill(pid, sign)

    thread = threading.Thread(target=strike)
    thread.start()
    line = failing(artifact, "--frames", "1000000", "--heartbeat", "2")
    thread.join()
    assert re.match(f"device 'pi02': {message}", line)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda device: shutil.rmtree(device), r"pi02/manifest\.json: no such file: compile the model again"),
        (lambda device: (device / "manifest.json").write_text("{"), r"pi02/manifest\.json: it has 1 bytes instead of"),
        (lambda device: (device / "weights.bin").unlink(), r"device 'pi02': .*file weights\.bin is missing: copy"),
        (lambda device: (device / "weights.bin").write_bytes(b""), r"device 'pi02': .*file weights\.bin has 0 bytes"),
        (lambda device: shutil.rmtree(device / "runtime"), r"device 'pi02': .*file runtime/__init__\.py is missing"),
    ],
)
def test_reports_incomplete_device_directory(
    artifact: Path, failing: Failing, change: Callable[[Path], object], message: str
) -> None:
    change(artifact / "pi02")
    # If the process has ended before its message is read, the line also states its exit code.
    assert re.search(message, failing(artifact))


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [
        "tile-height{layers=h..z parts=2}",
        "lop{layers=h..z parts=2}",
        "lip{layers=h,y parts=2 merge=one}",
        "lip{layers=h,y parts=2 merge=scatter}",
    ],
)
def test_nan_and_infinity_match_onnxruntime(split: str, tmp_path: Path) -> None:
    model, plan, out = tmp_path / "model.onnx", tmp_path / "plan.json", tmp_path / "out"
    onnx.save(network(), model)
    passes = ["-p", f"infer-shapes,form-layers,{split}", "--save-plan", str(plan), "-o", str(tmp_path / "y.onnx")]
    assert main(["opt", str(model), "--platform", "rpi4x2", *passes]) == 0
    assert main(["compile", str(model), "--platform", "rpi4x2", "--plan", str(plan), "-o", str(out)]) == 0
    x = image()
    x[0, 0, 3, 4], x[0, 1, 8, 2], x[0, 2, 8, 3], x[0, 2, 10, 10] = np.nan, np.inf, -np.inf, -np.inf
    np.savez(tmp_path / "x.npz", x=x)
    files = ["--inputs", str(tmp_path / "x.npz"), "--outputs", str(tmp_path / "y.npz")]
    assert main(["run", str(out), *files]) == 0
    reference = run_model(Model.load(network()), {"x": x})
    with np.load(tmp_path / "y.npz") as found:
        assert set(found.files) == set(reference) == {"y", "z"}
        for name, value in reference.items():
            finite = np.isfinite(value)
            assert np.isnan(value).any() and np.isinf(value).any() and finite.any()
            np.testing.assert_array_equal(found[name][~finite], value[~finite])
            np.testing.assert_allclose(found[name][finite], value[finite], rtol=1e-5, atol=1e-5)
    assert main(["verify", str(out), "--inputs", str(tmp_path / "x.npz")]) == 0
