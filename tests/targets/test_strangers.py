"""An attacker's artifact with valid checksums is only data: it is not run or built, and no other file is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.refusing import Refused
from support.tampering import reseal, rewrite

import dicompiler
from dicompiler import networks
from dicompiler.base.schema import load_json
from dicompiler.cli import main
from dicompiler.target.manifest import format_json, make_file_record, write_digests_and_checksum
from dicompiler_targets.mpi.codegen import generate_main

SECRET = "a line that is nobody's business"
HOSTS = '[[host]]\nname = "pi01"\nssh = "nowhere.invalid"\n[[host]]\nname = "pi02"\nssh = "nowhere.invalid"\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("strangers")
    for target in ("sockets", "mpi", "tflm"):
        dicompiler.compile(networks.build("lenet"), "rpi4x2", strategy="modnn", target=target, output=place / target)
    return place


@pytest.fixture
def artifact(made: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the artifact of the target in the parameter, next to files that must not be read."""
    (tmp_path / "secret.txt").write_text(SECRET)
    (tmp_path / "hosts.toml").write_text(HOSTS)
    return Path(shutil.copytree(made / getattr(request, "param", "sockets"), tmp_path / "net"))


def mark(place: Path) -> str:
    """Return Python code that leaves a file if it is run."""
    return f"open({str(place / 'ran')!r}, 'w').close()\n"


def lines(artifact: Path, refused: Refused, *commands: str) -> list[str]:
    """Run the commands, which must all refuse the artifact, and return their errors."""
    place = artifact.parent
    more = {
        "run": ["--outputs", place / "y.npz"],
        "deploy": ["--hosts", place / "hosts.toml", "--insecure", "--timeout", "20"],
        "report": ["-o", place / "r.html"],
    }
    return [refused(1, command, artifact, *more.get(command, [])) for command in commands]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(tmp_path, capsys)


def test_modules_that_lie_in_an_artifact_are_not_imported(artifact: Path) -> None:
    for name in ("numpy.py", "onnxruntime.py", "sitecustomize.py", "runtime.py", "dicompiler_targets.py", "json.py"):
        for place in (artifact, artifact / "pi01", artifact / "pi02"):
            (place / name).write_text(mark(artifact.parent))
    assert main(["run", str(artifact)]) == 0
    assert main(["verify", str(artifact)]) == 0
    assert not (artifact.parent / "ran").exists()


def append(name: str, text: str) -> Callable[[Path], None]:
    def change(artifact: Path) -> None:
        (artifact / name).parent.mkdir(exist_ok=True)
        with (artifact / name).open("a") as file:
            file.write(text)

    return change


@pytest.mark.parametrize("name", ["runtime/executor.py", "runtime/__init__.py", "runtime/own.py", "numpy.py"])
def test_another_runtime_is_refused(name: str, artifact: Path, refused: Refused) -> None:
    path = artifact / "pi02" / name
    path.write_text((path.read_text() if path.exists() else "") + mark(artifact.parent))
    record = make_file_record(path)
    rewrite(artifact / "pi02" / "manifest.json", lambda document: document["files"].update({name: record}))
    reseal(artifact)
    version = load_json(artifact / "artifact.json")["version"]
    for line in lines(artifact, refused, "run", "verify", "deploy"):
        words = f"pi02: {name} differs from that of dicompiler {version}: compile the model again"
        assert line.endswith(words)
    rewrite(artifact / "artifact.json", lambda document: document.update(version="9.9"))
    (line,) = lines(artifact, refused, "run")
    assert line.endswith(": compile the model again or install version 9.9")
    assert not (artifact.parent / "ran").exists()


@pytest.mark.parametrize("artifact", ["mpi"], indirect=True)
@pytest.mark.parametrize(
    "name", ["main.cc", "runtime/run.cc", "runtime/own.cc", "CMakeLists.txt", "run.sh", "rankfile"]
)
def test_sources_that_we_would_not_write_are_not_built(name: str, artifact: Path, refused: Refused) -> None:
    append(f"pi01/{name}", "// more\n")(artifact)
    write_digests_and_checksum(artifact)
    for line in lines(artifact, refused, "run", "verify"):
        assert f"pi01: {name} differs from that of dicompiler " in line
    (line,) = refused(1, "deploy", artifact, "--hosts", artifact.parent / "hosts.toml", "--insecure").splitlines()
    assert f"{name} differs" in line


BAD_CALLS = [
    ["input", 0, 'x"); std::system("touch ran'],
    ["input", "0); std::abort(", "x"],
    ["input", -1, "x"],
    ["input", True, "x"],
    ["run", "../../secret.txt", [], []],
    ["run", "/etc/passwd", [], []],
    ["output", "input", "../../../y.npy"],
    ["output", "nobody", "y.npy"],
    ["tensor", "t", "FLOAT}; std::abort();", [1]],
    ["tensor", "t", "FLOAT", [1.5]],
    ["system", "touch ran"],
    [],
    7,
]


@pytest.mark.parametrize("artifact", ["mpi"], indirect=True)
@pytest.mark.parametrize("call", BAD_CALLS, ids=str)
def test_output_of_a_program_does_not_become_code(call: object, artifact: Path, refused: Refused) -> None:
    path = artifact / "pi01" / "program.json"
    document = json.loads(path.read_text())
    document["ranks"][0]["roles"][0].append(call)
    path.write_text(format_json(document))
    try:
        # An attacker who changes the document could also replace main.cc by the program that is generated from it.
        text = generate_main(document)
    except (KeyError, TypeError, ValueError, AttributeError):
        text = (artifact / "pi01" / "main.cc").read_text()
    else:
        assert "std::system(" not in text.replace(r"\042); std::system(\042", "")
        return
    (artifact / "pi01" / "main.cc").write_text(text)
    write_digests_and_checksum(artifact)
    for line in lines(artifact, refused, "run", "verify"):
        assert "compile the model again" in line


def absolute(artifact: Path) -> None:
    entry = {str(artifact.parent / "secret.txt"): {"bytes": len(SECRET), "digest": "sha256:" + "0" * 64}}
    rewrite(artifact / "pi02" / "manifest.json", lambda document: document["files"].update(entry))
    reseal(artifact)


def upwards(artifact: Path) -> None:
    entry = {"../secret.txt": make_file_record(artifact.parent / "secret.txt")}
    rewrite(artifact / "artifact.json", lambda document: document["files"].update(entry))


def linked(name: str) -> Callable[[Path], None]:
    def change(artifact: Path) -> None:
        path = artifact / name
        path.unlink()
        path.symlink_to(artifact.parent / "secret.txt")
        record = make_file_record(path)
        rewrite(artifact / "artifact.json", lambda document: document["files"].update({name: record}))

    return change


@pytest.mark.parametrize(
    ("artifact", "change"),
    [
        ("sockets", absolute),
        ("sockets", upwards),
        ("sockets", linked("pi02/weights.bin")),
        ("sockets", linked("reference/model.onnx.data")),
        ("sockets", linked("plan.json")),
        ("mpi", upwards),
        ("mpi", linked("pi02/pi02/weights.bin")),
        ("mpi", linked("pi01/sender.json")),
        ("tflm", upwards),
        ("tflm", linked("pi01/manifest.json")),
    ],
    indirect=["artifact"],
)
def test_no_file_outside_an_artifact_is_read(
    artifact: Path, change: Callable[[Path], None], refused: Refused, request: pytest.FixtureRequest
) -> None:
    change(artifact)
    target = load_json(artifact / "artifact.json")["target"]
    commands = [
        "run",
        "verify",
        *(["deploy"] if target == "sockets" else []),
        *([] if change is absolute else ["report"]),
    ]
    for line in lines(artifact, refused, *commands):
        assert "compile the model again" in line and SECRET not in line, request.node.name


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(segments=[{"name": "s", "file": "../../x.onnx", "inputs": [], "outputs": []}]),
        lambda d: d.update(steps=[["run", -1]]),
        lambda d: d.update(threads=0),
        lambda d: d.update(threads="many"),
        lambda d: d.update(device="pi01"),
        lambda d: d.update(digest="0" * 64),
        lambda d: d.update(peers=[{"device": 3, "index": 0}]),
        lambda d: d["files"].pop("weights.bin"),
        lambda d: d["transfers"][0].update(sender="nobody"),
        lambda d: d["transfers"][0].update(bytes=-5),
        lambda d: d.clear(),
    ],
)
def test_manifest_with_other_fields_is_one_line(
    change: Callable[[dict[str, object]], object], artifact: Path, refused: Refused
) -> None:
    rewrite(artifact / "pi02" / "manifest.json", change)
    write_digests_and_checksum(artifact)
    (line,) = lines(artifact, refused, "run")
    assert str(artifact) in line
