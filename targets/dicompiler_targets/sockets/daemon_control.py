"""Start, stop and status of resident devices (daemons on other hosts), for `dicompiler deploy`."""

from __future__ import annotations

import json
import logging
import posixpath
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dicompiler.plugin_api import RunError, RunOptions, UsageError
from dicompiler.plugin_api.artifacts import DeviceStatus, ssh
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.daemon_client import DaemonConnector, ResidentCluster, call_daemon
from dicompiler_targets.sockets.deploy import (
    KEYS_DIRECTORY,
    RUN_PYTHON_SCRIPT,
    check_failed_devices,
    device_locations,
    find_listen_address,
    last_error_line,
    quote_python_path,
    start_command,
)
from dicompiler_targets.sockets.runtime import STATE_DIRECTORY
from dicompiler_targets.sockets.runtime.protocol import PeerRefused, ProtocolError

log = logging.getLogger("dicompiler")

START_SCRIPT = 'cd "$1" && shift && exec "$@"'
# A host's Python runs this script to stop a daemon. A daemon locks its state file, so the lock shows if it runs.
STOP_SCRIPT = """
import fcntl, json, os, signal, sys, time
def is_locked():
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
        if is_locked():
            ran = True
            os.kill(json.load(open(path))["pid"], number)
        while is_locked() and time.time() < end:
            time.sleep(0.02)
    if os.path.exists(path):
        os.remove(path)
print(PREFIX + json.dumps({"ran": ran}))
"""


class ResidentDevices:
    """The resident devices (daemons) of an artifact, as the `Service` that `dicompiler deploy` uses."""

    def __init__(self, directory: Path, options: RunOptions) -> None:
        self.directory, self.options = directory, options

    def start(self) -> tuple[str, ...]:
        """Start the devices that do not answer, and return the names of the started devices.

        Devices that run with another artifact load this one instead. A device that cannot be started is omitted with a
        warning if a failure plan covers its failure.

        Raises:
            RunError: No failure plan covers the missing devices. Devices that this call started are stopped again.
        """
        artifact = SocketsArtifact.load(self.directory)
        cluster = ResidentCluster.load_for(artifact)
        running, outdated = set[str](), set[str]()
        if cluster is not None:
            digests = {status.device: status.digest for status in cluster.status(self.options)}
            running = {name for name, digest in digests.items() if digest == artifact.digest}
            outdated = {name for name, digest in digests.items() if digest and name not in running}
        else:
            keys = None if self.options.keys is None else str(self.options.keys.absolute())
            token = "" if keys else secrets.token_hex(16)
            cluster = ResidentCluster(self.directory, artifact.digest, {}, token, keys, self.options.insecure)
        started, failed = list[str](), dict[str, RunError]()
        hosts = DaemonHosts(artifact, cluster, self.options)
        addresses = dict(cluster.addresses)

        def start(name: str) -> None:
            try:
                if name in outdated and hosts.load(name):
                    return
                addresses[name] = hosts.start(name)
                started.append(name)
            except RunError as error:
                failed[name] = error

        hosts.commands.run_parallel(start, [name for name in hosts.locations if name not in running])
        if artifact.make_schedule().find_failed_set(failed) is None:
            for name in started:
                hosts.stop(name)
        check_failed_devices(artifact, failed)
        replace(cluster, addresses={name: addresses[name] for name in sorted(addresses)}).save()
        return tuple(sorted(started))

    def hand_over(self, directory: Path) -> None:
        """List the running devices as those of the artifact in `directory`, and no longer as those of this one.

        The devices still run this artifact. The other artifact's `start` then finds them and makes them load that
        artifact.
        """
        cluster = ResidentCluster.load(self.directory)
        if cluster is not None:
            replace(cluster, directory=directory, digest=SocketsArtifact.load(directory).digest).save()
            cluster.remove()

    def stop(self) -> Mapping[str, bool]:
        """Stop all devices. Return, for each device, True if it was running."""
        artifact, cluster = SocketsArtifact.load(self.directory), ResidentCluster.load(self.directory)
        hosts = DaemonHosts(artifact, cluster, self.options)
        ran, failed = dict[str, bool](), dict[str, RunError]()

        def stop(name: str) -> None:
            try:
                ran[name] = hosts.stop(name)
            except RunError as error:
                failed[name] = error

        hosts.commands.run_parallel(stop, list(hosts.locations))
        if failed:
            groups = ("may still run", sorted(failed)), ("stopped", sorted(ran))
            summary = "; ".join(f"{label}: {', '.join(names)}" for label, names in groups if names)
            raise RunError(f"{failed[min(failed)]}; {summary}")
        if cluster is not None:
            cluster.remove()
        return {name: ran[name] for name in hosts.locations}

    def status(self) -> tuple[DeviceStatus, ...]:
        cluster = ResidentCluster.load(self.directory)
        if cluster is None:
            raise UsageError(f"{self.directory}: no resident devices: start them with 'dicompiler deploy --resident'")
        return cluster.status(self.options)


class DaemonHosts:
    """Starts and stops single daemons on the hosts of a cluster.

    Attributes:
        locations: The host and the settings of each device, from the hosts file.
        commands: Runs commands over ssh.
    """

    def __init__(self, artifact: SocketsArtifact, cluster: ResidentCluster | None, options: RunOptions) -> None:
        self.locations, self._cluster = device_locations(artifact, options), cluster
        assert options.hosts is not None
        self.commands = ssh.RemoteCommands(time.monotonic() + options.timeout_s, options.hosts.file)
        self._options = options if cluster is None else cluster.run_options(options)

    def start(self, name: str) -> tuple[str, int]:
        """Start a device's daemon and return its host and port; raise RunError with its message if it fails."""
        location = self.locations[name]
        arguments = ["--resident", *["--insecure"] * self._options.insecure]
        arguments += ["--log", f"../{STATE_DIRECTORY}/{location.device}.log", "--detach"]
        arguments += ["--coordinator", find_listen_address(self._options, [location])]
        token = f"{self._cluster.token if self._cluster else ''}\n".encode()
        command = start_command(location, arguments, self._options)
        result = self.commands.run(location, START_SCRIPT, command, lambda pipe: pipe.write(token))
        with suppress(ValueError, LookupError, TypeError):
            host, port = json.loads(result.prefixed_lines[-1])["address"]
            return str(host), int(port)
        raise RunError(f"{location.title}: {last_error_line(result)}")

    def load(self, name: str) -> bool:
        """Let a device's daemon load the artifact that was copied to the device's directory.

        Return True if it has loaded the artifact. Otherwise, stop the daemon and return False.
        """
        cluster = self._cluster
        assert cluster is not None
        try:
            keys, deadline = cluster.load_keys(self._options), time.monotonic() + self._options.timeout_s
            insecure, request = self._options.insecure, {"request": "load"}
            channel, answer = call_daemon(
                name, cluster.addresses[name], keys, insecure, cluster.token, request, deadline
            )
            channel.close()
            if answer.get("digest") == cluster.digest:
                return True
        except (OSError, ValueError, ProtocolError, PeerRefused) as error:
            log.warning("%s: the device cannot load another artifact, and is started again: %s", name, error)
        self.stop(name)
        return False

    def stop(self, name: str) -> bool:
        location = self.locations[name]
        file = posixpath.join(posixpath.dirname(location.directory), STATE_DIRECTORY, f"{name}.json")
        code = f"PREFIX = {ssh.LINE_PREFIX!r}\n{STOP_SCRIPT}".encode()
        arguments = [quote_python_path(location), ssh.quote_path(file)]
        result = self.commands.run(location, RUN_PYTHON_SCRIPT, arguments, lambda pipe: pipe.write(code))
        with suppress(ValueError, LookupError, TypeError):
            return bool(json.loads(result.prefixed_lines[-1])["ran"])
        raise RunError(f"{location.title}: the device cannot be stopped: {last_error_line(result)}")


def uninstall(directory: Path, options: RunOptions) -> Mapping[str, bool]:
    """Stop the resident devices (daemons), and remove all files of the artifact from the hosts.

    Return, for each device, True if it was running or files were removed.
    """
    ran = ResidentDevices(directory, options).stop()
    locations = device_locations(SocketsArtifact.load(directory), options)
    assert options.hosts is not None
    commands = ssh.RemoteCommands(time.monotonic() + options.timeout_s, options.hosts.file)

    def remove(name: str) -> bool:
        parent = posixpath.dirname(locations[name].directory)
        records = [posixpath.join(parent, STATE_DIRECTORY, f"{name}{suffix}") for suffix in (".json", ".log", ".log.1")]
        keys = posixpath.join(parent, KEYS_DIRECTORY, name)
        return commands.remove_copies(locations[name], [locations[name].directory, keys, *records])

    removed = commands.run_parallel(remove, list(locations))
    return {name: was_there or ran[name] for name, was_there in zip(locations, removed, strict=True)}


def make_connector(artifact: SocketsArtifact, options: RunOptions) -> DaemonConnector | None:
    """Return the connector to the artifact's resident devices (running daemons); None if there are none.

    If `options.hosts` is given, a device that does not answer is restarted.
    """
    cluster = None if options.emulation is not None else ResidentCluster.load_for(artifact)
    if cluster is None:
        return None
    run_options, restart = cluster.run_options(options), None
    if options.hosts is not None:
        restart = DaemonHosts(artifact, cluster, run_options).start
    return DaemonConnector(cluster, run_options, restart)
