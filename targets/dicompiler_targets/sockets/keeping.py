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

from dicompiler.plugin_api import DeviceStatus, Place, RunError, RunOptions, UsageError, one_line, ssh
from dicompiler_targets.sockets.artifact import Artifact
from dicompiler_targets.sockets.deploy import (
    RUN_PYTHON,
    check_missing,
    listen_address,
    places_of,
    python_word,
    runtime_words,
    start_words,
)
from dicompiler_targets.sockets.kept import Calls, Kept
from dicompiler_targets.sockets.runtime import KEPT
from dicompiler_targets.sockets.runtime.greeting import TOKEN
from dicompiler_targets.sockets.runtime.line import is_loopback, split_address

START = 'cd "$1" && shift && exec "$@"'
# Fed to the Python there. The file is locked by the process that it names, for as long as that runs.
STOP = """
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


class Cluster:
    """The devices of the artifact in `directory` that stay, or could: see Service."""

    def __init__(self, directory: Path, options: RunOptions) -> None:
        self.directory, self.options = directory, options

    def start(self) -> tuple[str, ...]:
        """See Service. A device that does not start is left out with a warning where the artifact has a plan for its
        loss; else those that were started here are ended."""
        artifact = Artifact.load(self.directory)
        kept = Kept.of(artifact)
        there = {one.device for one in kept.status(self.options) if one.answers} if kept is not None else set()
        if kept is None:
            keys = None if self.options.keys is None else str(self.options.keys.absolute())
            token = "" if keys else secrets.token_hex(16)
            kept = Kept(self.directory, artifact.digest, {}, token, keys, self.options.insecure)
        started, failed = list[str](), dict[str, RunError]()
        hosts = Hosts(artifact, kept, self.options)

        def work(name: str) -> None:
            try:
                found[name] = hosts.start(name)
                started.append(name)
            except RunError as error:
                failed[name] = error

        found = dict(kept.addresses)
        hosts.calls.each(work, [name for name in hosts.places if name not in there])
        if artifact.schedule().covering(failed) is None:
            for name in started:
                hosts.stop(name)
        check_missing(artifact, failed)
        replace(kept, addresses={name: found[name] for name in sorted(found)}).save()
        return tuple(sorted(started))

    def stop(self) -> Mapping[str, bool]:
        """See Service. Those that can be reached are stopped although others cannot."""
        artifact, kept = Artifact.load(self.directory), Kept.load(self.directory)
        hosts = Hosts(artifact, kept, self.options)
        ran, failed = dict[str, bool](), dict[str, RunError]()

        def work(name: str) -> None:
            try:
                ran[name] = hosts.stop(name)
            except RunError as error:
                failed[name] = error

        hosts.calls.each(work, list(hosts.places))
        if failed:
            which = ("may still run", sorted(failed)), ("stopped", sorted(ran))
            told = "; ".join(f"{words}: {', '.join(names)}" for words, names in which if names)
            raise RunError(f"{failed[min(failed)]}; {told}")
        if kept is not None:
            kept.forget()
        return {name: ran[name] for name in hosts.places}

    def status(self) -> tuple[DeviceStatus, ...]:
        """See Service. UsageError where none are kept."""
        kept = Kept.load(self.directory)
        if kept is None:
            raise UsageError(
                f"{self.directory}: nothing of it is kept running: start it with 'dicompiler deploy --keep'"
            )
        return kept.status(self.options)

    def units(self) -> Mapping[str, str]:
        """See Service: of the user's own systemd, a unit for each device. Where there are no keys the units hold the
        cluster's token. What is written down beside the artifact says that they are kept, at the addresses that the
        hosts file gives with their ports. UsageError without those."""
        artifact = Artifact.load(self.directory)
        places = places_of(artifact, self.options)
        addresses = {}
        for name, place in places.items():
            host, port = split_address(place.listen or "0:0")
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
        kept = Kept.of(artifact)
        keys = None if self.options.keys is None else str(self.options.keys.absolute())
        token = "" if keys else (kept.token if kept is not None else "") or secrets.token_hex(16)
        kept = Kept(self.directory, artifact.digest, addresses, token, keys, self.options.insecure)
        kept.save()
        name = self.directory.resolve().name
        return {f"dicompiler-{name}-{d}.service": self._unit(place, token) for d, place in places.items()}

    def _unit(self, place: Place, token: str) -> str:
        def path(text: str) -> str:
            text = text.replace("%", "%%")
            return text if text.startswith("/") else f"%h/{text.removeprefix('~/')}"

        words = map(_unit_word, runtime_words(place, _service_words(place, self.options), self.options))
        python = _quoted(path(place.python)) if "/" in place.python else f"/usr/bin/env {_unit_word(place.python)}"
        environment = f"Environment={TOKEN}={token}\n" if token else ""
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


def _service_words(place: Place, options: RunOptions) -> list[str]:
    insecure = ["--insecure"] * options.insecure
    return ["--serve", *insecure, "--log", f"../{KEPT}/{place.device}.log"]


class Hosts:
    """The hosts of a cluster: starts and stops a device there."""

    def __init__(self, artifact: Artifact, kept: Kept | None, options: RunOptions) -> None:
        self.places, self._kept = places_of(artifact, options), kept
        assert options.hosts is not None
        self.calls = ssh.Calls(time.monotonic() + options.timeout_s, options.hosts.file)
        self.options = options if kept is None else kept.options(options)

    def start(self, name: str) -> tuple[str, int]:
        """Starts a device, which stays: where it is called. RunError with its words."""
        place = self.places[name]
        towards = listen_address(self.options, [place])
        words = [*_service_words(place, self.options), "--detach", "--control", towards]
        token = f"{self._kept.token if self._kept else ''}\n".encode()
        done = self.calls.run(place, START, start_words(place, words, self.options), lambda pipe: pipe.write(token))
        with suppress(ValueError, LookupError, TypeError):
            host, port = json.loads(done.marked[-1])["address"]
            return str(host), int(port)
        said = done.errors.strip().splitlines()[-1:] or [f"exit code {done.code}"]
        raise RunError(f"{place.title}: {one_line(said[0])}")

    def stop(self, name: str) -> bool:
        """Ends a device that stays; whether it ran."""
        place = self.places[name]
        file = posixpath.join(posixpath.dirname(place.directory), KEPT, f"{name}.json")
        code = f"MARK = {ssh.MARK!r}\n{STOP}".encode()
        done = self.calls.run(
            place, RUN_PYTHON, [python_word(place), ssh.path_word(file)], lambda pipe: pipe.write(code)
        )
        with suppress(ValueError, LookupError, TypeError):
            return bool(json.loads(done.marked[-1])["ran"])
        said = done.errors.strip().splitlines()[-1:] or [f"exit code {done.code}"]
        raise RunError(f"{place.title}: it cannot be stopped: {one_line(said[0])}")


def joined(artifact: Artifact, options: RunOptions) -> Calls | None:
    """What joins a run to the devices that are kept running; None where there are none. With hosts, one that does not
    answer is started again."""
    kept = None if options.emulation is not None else Kept.of(artifact)
    if kept is None:
        return None
    own, revive = kept.options(options), None
    if options.hosts is not None:
        revive = Hosts(artifact, kept, own).start
    return Calls(kept, own, revive)
