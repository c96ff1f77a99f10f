"""Keeping a cluster running between clients: its devices are started over ssh, stopped, asked how they do, or handed to
systemd.

In: an artifact that is installed on its hosts. Out: devices that stay, the file that says where, unit files.
"""

from __future__ import annotations

import json
import posixpath
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dicompiler.plugin_api import RunError, RunOptions, UsageError
from dicompiler.plugin_api.artifacts import DeviceLocation, DeviceStatus, ssh
from dicompiler.plugin_api.utilities import one_line
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.daemon_client import DaemonConnector, ResidentCluster
from dicompiler_targets.sockets.deploy import (
    RUN_PYTHON_SCRIPT,
    check_failed_devices,
    device_places,
    find_listen_address,
    quoted_python,
    runtime_command,
    start_command,
)
from dicompiler_targets.sockets.runtime import STATE_DIRECTORY
from dicompiler_targets.sockets.runtime.handshake import TOKEN_VARIABLE
from dicompiler_targets.sockets.runtime.transport import is_loopback, split_address

START_SCRIPT = 'cd "$1" && shift && exec "$@"'
# Fed to the Python there. The file is locked by the process that it names, for as long as that runs.
STOP_SCRIPT = """
import fcntl, json, os, signal, sys, time
def held():
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except EnvironmentError:
        return True
    return False
path, ran = sys.argv[1], False
try:
    file = open(path)
except EnvironmentError:
    file = None
if file is not None:
    for number, seconds in ((signal.SIGTERM, 3), (signal.SIGKILL, 3)):
        end = time.time() + seconds
        if held():
            ran = True
            os.kill(json.load(open(path))["pid"], number)
        while held() and time.time() < end:
            time.sleep(0.02)
    if os.path.exists(path):
        os.remove(path)
print(MARK + json.dumps({"ran": ran}))
"""


class ResidentDevices:
    """The devices of the artifact in `directory` that stay, or could: see Service."""

    def __init__(self, directory: Path, options: RunOptions) -> None:
        self.directory, self.options = directory, options

    def start(self) -> tuple[str, ...]:
        """See Service. A device that does not start is left out with a warning where the artifact has a plan for its
        loss; else those that were started here are ended."""
        artifact = SocketsArtifact.load(self.directory)
        kept = ResidentCluster.load_for(artifact)
        there = {one.device for one in kept.status(self.options) if one.is_responding} if kept is not None else set()
        if kept is None:
            keys = None if self.options.keys is None else str(self.options.keys.absolute())
            token = "" if keys else secrets.token_hex(16)
            kept = ResidentCluster(self.directory, artifact.digest, {}, token, keys, self.options.insecure)
        started, failed = list[str](), dict[str, RunError]()
        hosts = DaemonHosts(artifact, kept, self.options)

        def work(name: str) -> None:
            try:
                found[name] = hosts.start(name)
                started.append(name)
            except RunError as error:
                failed[name] = error

        found = dict(kept.addresses)
        hosts.calls.run_parallel(work, [name for name in hosts.places if name not in there])
        if artifact.make_schedule().find_failed_set(failed) is None:
            for name in started:
                hosts.stop(name)
        check_failed_devices(artifact, failed)
        replace(kept, addresses={name: found[name] for name in sorted(found)}).save()
        return tuple(sorted(started))

    def stop(self) -> Mapping[str, bool]:
        """See Service. Those that can be reached are stopped although others cannot."""
        artifact, kept = SocketsArtifact.load(self.directory), ResidentCluster.load(self.directory)
        hosts = DaemonHosts(artifact, kept, self.options)
        ran, failed = dict[str, bool](), dict[str, RunError]()

        def work(name: str) -> None:
            try:
                ran[name] = hosts.stop(name)
            except RunError as error:
                failed[name] = error

        hosts.calls.run_parallel(work, list(hosts.places))
        if failed:
            which = ("may still run", sorted(failed)), ("stopped", sorted(ran))
            told = "; ".join(f"{words}: {', '.join(names)}" for words, names in which if names)
            raise RunError(f"{failed[min(failed)]}; {told}")
        if kept is not None:
            kept.remove()
        return {name: ran[name] for name in hosts.places}

    def status(self) -> tuple[DeviceStatus, ...]:
        """See Service. UsageError where none are kept."""
        kept = ResidentCluster.load(self.directory)
        if kept is None:
            raise UsageError(
                f"{self.directory}: nothing of it is kept running: start it with 'dicompiler deploy --keep'"
            )
        return kept.status(self.options)

    def units(self) -> Mapping[str, str]:
        """See Service: of the user's own systemd, a unit for each device. Where there are no keys the units hold the
        cluster's token. What is written down beside the artifact says that they are kept, at the addresses that the
        hosts file gives with their ports. UsageError without those."""
        artifact = SocketsArtifact.load(self.directory)
        places = device_places(artifact, self.options)
        addresses = {}
        for name, place in places.items():
            host, port = split_address(place.listen_address or "0:0")
            if not port:
                raise UsageError(
                    f'{place.title}: it must be called at the same place after each boot: add address = "ADDRESS:PORT" '
                    "to its entry in the hosts file"
                )
            if self.options.keys is None and not self.options.insecure and not is_loopback(host):
                raise UsageError(
                    f"{place.title}: {host} is not on this host, and there are no keys (--keys, --insecure)"
                )
            addresses[name] = host, port
        kept = ResidentCluster.load_for(artifact)
        keys = None if self.options.keys is None else str(self.options.keys.absolute())
        token = "" if keys else (kept.token if kept is not None else "") or secrets.token_hex(16)
        kept = ResidentCluster(self.directory, artifact.digest, addresses, token, keys, self.options.insecure)
        kept.save()
        name = self.directory.resolve().name
        return {f"dicompiler-{name}-{d}.service": self._unit(place, token) for d, place in places.items()}

    def _unit(self, place: DeviceLocation, token: str) -> str:
        def path(text: str) -> str:
            text = text.replace("%", "%%")
            return text if text.startswith("/") else f"%h/{text.removeprefix('~/')}"

        words = map(_unit_word, runtime_command(place, _daemon_arguments(place, self.options), self.options))
        python = _quoted(path(place.python)) if "/" in place.python else f"/usr/bin/env {_unit_word(place.python)}"
        environment = f"Environment={TOKEN_VARIABLE}={token}\n" if token else ""
        return (
            f"[Unit]\nDescription=Device {place.device} of a network that dicompiler split\n"
            "# It is started again until its network is there.\nStartLimitIntervalSec=0\n\n"
            f"[Service]\nType=exec\nWorkingDirectory={path(place.directory)}\n{environment}"
            f"ExecStart={python} {' '.join(words)}\n"
            "Restart=on-failure\nRestartSec=1\n\n[Install]\nWantedBy=default.target\n"
        )


def _unit_word(text: str) -> str:
    """A word as systemd reads it, which takes nothing in it for its own."""
    return _quoted(text.replace("%", "%%").replace("$", "$$"))


def _quoted(text: str) -> str:
    """As one word, whatever is in it."""
    if re.fullmatch(r"[\w./:,%$=+@-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _daemon_arguments(place: DeviceLocation, options: RunOptions) -> list[str]:
    insecure = ["--insecure"] * options.insecure
    return ["--serve", *insecure, "--log", f"../{STATE_DIRECTORY}/{place.device}.log"]


class DaemonHosts:
    """The hosts of a cluster: starts and stops a device there."""

    def __init__(self, artifact: SocketsArtifact, kept: ResidentCluster | None, options: RunOptions) -> None:
        self.places, self._cluster = device_places(artifact, options), kept
        assert options.hosts is not None
        self.calls = ssh.RemoteCommands(time.monotonic() + options.timeout_s, options.hosts.file)
        self.options = options if kept is None else kept.run_options(options)

    def start(self, name: str) -> tuple[str, int]:
        """Starts a device, which stays: where it is called. RunError with its words."""
        place = self.places[name]
        towards = find_listen_address(self.options, [place])
        words = [*_daemon_arguments(place, self.options), "--detach", "--control", towards]
        token = f"{self._cluster.token if self._cluster else ''}\n".encode()
        done = self.calls.run(
            place, START_SCRIPT, start_command(place, words, self.options), lambda pipe: pipe.write(token)
        )
        with suppress(ValueError, LookupError, TypeError):
            host, port = json.loads(done.prefixed_lines[-1])["address"]
            return str(host), int(port)
        said = done.errors.strip().splitlines()[-1:] or [f"exit code {done.exit_code}"]
        raise RunError(f"{place.title}: {one_line(said[0])}")

    def stop(self, name: str) -> bool:
        """Ends a device that stays; whether it ran."""
        place = self.places[name]
        file = posixpath.join(posixpath.dirname(place.directory), STATE_DIRECTORY, f"{name}.json")
        code = f"MARK = {ssh.LINE_PREFIX!r}\n{STOP_SCRIPT}".encode()
        done = self.calls.run(
            place, RUN_PYTHON_SCRIPT, [quoted_python(place), ssh.quote_path(file)], lambda pipe: pipe.write(code)
        )
        with suppress(ValueError, LookupError, TypeError):
            return bool(json.loads(done.prefixed_lines[-1])["ran"])
        said = done.errors.strip().splitlines()[-1:] or [f"exit code {done.exit_code}"]
        raise RunError(f"{place.title}: it cannot be stopped: {one_line(said[0])}")


def make_connector(artifact: SocketsArtifact, options: RunOptions) -> DaemonConnector | None:
    """What joins a run to the devices that are kept running; None where there are none. With hosts, one that does not
    answer is started again."""
    kept = None if options.emulation is not None else ResidentCluster.load_for(artifact)
    if kept is None:
        return None
    own, revive = kept.run_options(options), None
    if options.hosts is not None:
        revive = DaemonHosts(artifact, kept, own).start
    return DaemonConnector(kept, own, revive)
