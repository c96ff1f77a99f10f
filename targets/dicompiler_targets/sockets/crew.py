"""The devices of a run: how they join, what they say, who is away, and how one that was lost comes back.

In: an artifact, how devices are started. Out: events of frames, for the session; roles that are in force, and RunError
where a device fails whose loss is not covered.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

from dicompiler.plugin_api import RunError, RunOptions
from dicompiler_targets.sockets.artifact import Artifact
from dicompiler_targets.sockets.hearing import MESSAGE_KINDS, Hearing
from dicompiler_targets.sockets.joining import Door
from dicompiler_targets.sockets.kept import Calls
from dicompiler_targets.sockets.leaving import Leaving
from dicompiler_targets.sockets.processes import Process, Start, dismiss
from dicompiler_targets.sockets.returns import Returns
from dicompiler_targets.sockets.root_cause import CAUSE, LOSS, Event, Failure, endings, failure_of, root_cause
from dicompiler_targets.sockets.runtime.frames import (
    Kind,
    Window,
)
from dicompiler_targets.sockets.runtime.greeting import CONTROL, TOKEN, Membership
from dicompiler_targets.sockets.runtime.lines import Lines

log = logging.getLogger("dicompiler")

TICK_S, SHORT_S = 0.05, 0.002
"""Seconds between two looks at the processes; while lost ones are ending."""
SETTLE_S = 0.3
"""Seconds in which the cause of a failure can show: that a connection was lost is told before the death behind it."""
DOUBT_S = 0.15
"""Seconds in which a device that others have lost can show that it is gone for us too."""


def halfway(deadline: float) -> float:
    """When half of the time that is left is over; of time.monotonic, as `deadline`."""
    return (time.monotonic() + deadline) / 2


class Crew:
    """`processes`: of all devices; `away`: those that are not there. `window`: the frames on their way, by numbers that
    each device knows them by; `schedule`: the role of each.

    A loss that the artifact's roles cover makes all frames before `window.end` void: `void` is true until the session
    has given them again. More may follow once `changing` (who has not answered yet) is empty. `lost`: who was lost
    last; `lost_s`: when the first loss was noticed (of time.perf_counter) after which no frame was finished, 0 without
    one, for the session to set back. `told`: called with each loss and return: (kind, device, why); leaving: where the
    reason of a loss shows later. beside: as of Lines.
    """

    def __init__(
        self,
        artifact: Artifact,
        options: RunOptions,
        in_flight: int,
        start: Start,
        beside: int,
        told: Callable[[Any, str, str], None],
        leaving: Leaving,
    ) -> None:
        self.artifact, self.options, self.told = artifact, options, told
        self._in_flight = in_flight
        self.processes: dict[str, Process] = {}
        self.window, self.schedule = Window(None), artifact.schedule()
        self.away = set(options.without)
        self.changing: set[str] = set()
        self.void, self.lost, self.lost_s = False, "", 0.0
        self.lines = Lines(options.heartbeat_s, beside)
        self._told = self._joined = self._finishing = False
        self._doubts: list[tuple[Failure, float]] = []
        self._warned: set[str] = set()
        self._changed, self._looked = 0, 0.0
        self._start, self._leaving = start, leaving
        self._roles = artifact.roles
        self._hearing = Hearing(self._roles, self.window, self.schedule, self._awaits_ready)
        self._returns: Returns | None = None
        self._door: Door | Calls | None = None
        self._member = Membership()

    @property
    def there(self) -> list[str]:
        """The devices that take part, in order."""
        return [name for name in self.artifact.devices if name not in self.away]

    # -- starting and ending

    def join(self, door: Door | Calls, deadline: float, check_time: Callable[..., None]) -> None:
        """Starts the devices and waits until every one is connected to all its peers and has made its sessions.
        check_time: (deadline, who is waited for, more words) raises RunError."""
        self._door, self._member = door, door.membership
        common = ["--control", door.address, "--run", self._member.run, "--timeout", f"{self.options.timeout_s:g}"]
        common += ["--heartbeat", f"{self.options.heartbeat_s:g}", *["--insecure"] * self.options.insecure]
        door.open(self.processes, self.artifact.digest)
        if self.schedule.survives:
            self._returns = Returns(
                lambda name: self._started(name, common), set(filter(self._foreign, self.artifact.devices))
            )
        for manifest in self.artifact.manifests:
            name = manifest["device"]
            if name in self.options.elsewhere and name not in self.away:
                before = "" if self.options.keys else f"{TOKEN}={self._member.token} "
                after = " --keys KEYS" if self.options.keys else ""
                words = f"{before}python3 -m runtime {' '.join(common)}{after}"
                log.warning("start %s in its directory on its host: %s", name, words)
            self.processes[name] = Process(manifest) if self._foreign(name) else self._started(name, common)
        coming = halfway(deadline)
        while waiting := [name for name in self.there if self.processes[name].channel is None]:
            process = door.admit(TICK_S)
            if process is not None and process.device in self.away:
                dismiss(process)  # nobody awaits it yet: it may come once all others are there
                self.processes[process.device] = Process(process.manifest)
                door.forget(process.device)
            elif process is not None:
                self._hearing.listen(process, self.lines)
            self._hear(lambda: True)
            self._miss([name for name in waiting if self.processes[name].channel is None], coming)
            check_time(deadline, waiting, door.refused)
        lost = self.schedule.covering(self.away) or frozenset()
        self.schedule.change(lost, 0, 0)
        for name in self.there:
            self._tell_peers(name, {"away": sorted(self.away), "lost": sorted(lost)} if self.away else {})
        self._told, coming = True, halfway(deadline)
        while (
            (waiting := [name for name in self.there if name not in self._hearing.ready])
            or self._doubts
            or self._leaving
        ):
            self._hear(lambda: False)
            self._miss([name for name in waiting if name not in self._hearing.ready], coming)
            check_time(deadline, waiting or self.there)
        self._joined = True

    def _hear(self, ready: Callable[[], object]) -> None:
        """Handles what has come while the devices join, or comes within a tick."""
        for event in self.events(ready):
            self.notice(event)
        self.look()

    def _miss(self, waiting: Collection[str], coming: float) -> None:
        """Takes those as lost that have not come by `coming`, where that is covered: what is left is for frames."""
        if time.monotonic() > coming and self.schedule.survives and self.schedule.covering({*self.away, *waiting}):
            for name in waiting:
                self._failed(Failure(name, "it did not come in time", name, CAUSE, gone=True))

    def _foreign(self, name: str) -> bool:
        """Whether it is not ours to start."""
        return name in self.options.elsewhere or name in self.options.without

    def _started(self, name: str, common: list[str]) -> Process:
        manifest = next(manifest for manifest in self.artifact.manifests if manifest["device"] == name)
        process = self._start(manifest, common)
        process.tell(self._member.token)
        return process

    def _tell_peers(self, name: str, more: dict[str, Any]) -> None:
        """Tells a device where its peers are."""
        addresses = {other: self.processes[other].address for other in self.there}
        peers = {"addresses": addresses, "in_flight": self._in_flight, **self._member.hello(CONTROL, name), **more}
        self.processes[name].connection().send_json(Kind.PEERS, peers)

    def finish(self) -> None:
        """Tells the devices that there are no more frames."""
        self._finishing = True
        for name in self.there:
            self.processes[name].connection().send(Kind.FINISH, frame=self.window.end)

    def end(self) -> None:
        """Ends all processes and connections."""
        self.lines.end()
        if self._door is not None:
            self._door.close()
        self._leaving.end(list(self.processes.values()))

    # -- what devices say

    def events(self, ready: Callable[[], object]) -> Iterator[Event]:
        """What has come, or comes within a tick; does not wait where something else is `ready`."""
        tick_s = SHORT_S if self._leaving and not self.lost_s else TICK_S
        heard = self._hearing.events
        self.lines.drive(lambda: heard or ready(), time.monotonic() + tick_s)
        while heard:
            yield heard.popleft()

    def notice(self, event: Event) -> bool:
        """Whether the event is about a frame, which is the session's to handle. Raises RunError as the class."""
        process, header = self.processes[event.device], event.header
        if header is not None and header.kind in MESSAGE_KINDS:
            process.messages -= 1
        if header is not None and header.kind is Kind.LATE and header.frame < self.window.first:
            return False  # it was given again since
        failure = failure_of(event, self.processes)
        if failure is not None:
            # After its report a device may end its connection.
            if process.report is None:
                self._failed(failure)
        elif header is None:
            return False
        elif header.kind is Kind.READY:
            self._hearing.ready.add(event.device)
            if event.device in self.away:
                self._take_back(event.device)
        elif header.kind is Kind.REPORT:
            process.report = event.payload
        else:
            if header.frame >= self._changed:  # CHANGED, or a frame by the roles that are in force now
                self.changing.discard(event.device)
            return header.kind is not Kind.CHANGED and header.frame >= self.window.first
        return False

    def _awaits_ready(self, name: str) -> bool:
        """Whether a device has been told its peers, so that it may be ready."""
        return name not in self.away or (self._returns is not None and self._returns.coming == name)

    # -- who is there

    def look(self) -> None:
        """Looks at processes, doubts and returns, if the last look was a tick ago. Raises RunError as the class."""
        now = time.monotonic()
        if now < self._looked + TICK_S:
            if self._leaving and not self.lost_s:
                self._leaving.look()
            return
        self._looked = now
        self._leaving.look()
        for failure in endings(tuple(self.processes.values())):
            self._failed(failure)
        if any(now > until for _, until in self._doubts):
            self._decide()
        if self._returns is not None and self._joined and not self._finishing:
            self._look_for_returns(self._returns)

    def _failed(self, failure: Failure) -> None:
        """Goes on without the device, if that can be; raises RunError for the failure behind this one if not."""
        if not self.schedule.survives:
            self._raise([failure])
        for name in (failure.says, failure.device):
            if name in self.away:  # an end that was to come, or a return that fails
                if self._returns is not None and self._returns.awaits(name):
                    self._give_up(name, failure.message)
                return
        if not failure.gone:
            self._raise([failure])
        elif failure.rank not in (CAUSE, LOSS):
            if all(failure.device != one.device or failure.says != one.says for one, _ in self._doubts):
                wait_s = SETTLE_S if failure.says == failure.device else DOUBT_S  # its words may be on their way
                self._doubts.append((failure, time.monotonic() + wait_s))
        elif self.schedule.covering(self.away | {failure.device}) is None:
            self._raise([failure])
        else:
            self._lose(failure)

    def _decide(self) -> None:
        """Of devices that blame each other the one that most do is taken as lost, if that is covered."""
        doubts = [one for one, _ in self._doubts]
        blamed = Counter(one.device for one in doubts)
        fit = [one for one in doubts if self.schedule.covering(self.away | {one.device}) is not None]
        if not fit:
            self._raise(doubts)
        self._lose(max(fit, key=lambda one: blamed[one.device]))

    def _lose(self, failure: Failure) -> None:
        """Goes on without the device: all others forget what is on its way and take other roles."""
        self.lost = name = failure.device
        self.lost_s = self.lost_s or time.perf_counter()
        self._looked = time.monotonic()  # nothing of that now
        assert self._returns is not None
        if self._returns.coming:  # which may be on its way to the lost one
            self._give_up(self._returns.coming, f"{name!r} was lost meanwhile")
        self.away.add(name)
        self._doubts = [(one, at) for one, at in self._doubts if name not in (one.device, one.says)]
        process = self._forget(name)
        self._change(drop=self._played(name))
        self._returns.lost(name)
        self._leaving.add(process, failure)
        self.told("loss", name, failure.message)

    def _dismiss(self, name: str) -> None:
        """Ends a device's process and connection, and forgets what it said."""
        dismiss(self._forget(name))

    def _forget(self, name: str) -> Process:
        """Ends a device's connection and forgets what it said; its process, no longer in use."""
        process = self.processes[name]
        with self.lines.turn:
            if process.channel is not None:
                process.channel.close()
            self._hearing.forget(name)
        self.changing.discard(name)
        self.processes[name] = Process(process.manifest)
        assert self._door is not None
        self._door.forget(name)
        return process

    def _played(self, name: str) -> bool:
        """Whether the device has a part in a frame that is on its way, or none is: else all of them go on."""
        numbers = [number for number in range(self.window.oldest, self.window.end) if self.window.has(number)]
        return not numbers or any(name in self._roles[self.schedule.role(number)].players for number in numbers)

    def _change(self, drop: bool, back: str = "") -> None:
        """Tells everybody, those first that begin, who is away and by which roles all goes from the next frame on, with
        the next push. drop: what is on its way is forgotten and given again; back: the device whose return changes
        that, which has begun nothing. Who was not told its peers hears of it with them."""
        if not self._told:
            return
        if self.window.end <= self._changed:  # an answer tells to which change, and so does what peers send
            self.window.finish(self.window.open())
        first = self._changed = self.window.end
        lost = self.schedule.covering(self.away)
        assert lost is not None
        self.schedule.change(lost, first, self.window.oldest)
        if drop:
            self.window.drop(first)
            self.void = True
        self.changing = set() if self._finishing else set(self.there)
        words = {"away": sorted(self.away), "lost": sorted(lost), "first": first}
        inputs = self._roles[self.schedule.role(first)].inputs
        for name in sorted(self.there, key=lambda name: not inputs[name]):
            self.processes[name].connection().post_json(Kind.CHANGE, {**words, "drop": drop or name == back})

    def _raise(self, failures: list[Failure]) -> None:
        """Raises RunError for the failure that is behind the first ones that were noticed."""
        until = time.monotonic() + SETTLE_S
        while all(failure.rank > CAUSE for failure in failures) and time.monotonic() < until:
            heard = (failure_of(event, self.processes) for event in self.events(lambda: False))
            failures += [failure for failure in heard if failure is not None]
            failures += endings(self.processes[name] for name in self.there)
        raise RunError(root_cause(failures, self.processes))

    # -- returns

    def _look_for_returns(self, returns: Returns) -> None:
        """Starts lost devices again, lets in who has come, and tells one after the other where its peers are."""
        assert self._door is not None
        for name in returns.due():
            try:
                self.processes[name] = returns.start(name)
            except RunError as error:
                self._give_up(name, str(error))
        try:
            process = self._door.admit(0)
        except RunError as error:  # it holds another artifact
            self._warn(str(error))
            process = None
        if process is not None:
            self._hearing.listen(process, self.lines)
            returns.arrived(process.device)
        if not self.changing and not self.void and (guest := returns.next()):
            self._tell_peers(guest, {"away": sorted(self.away - {guest}), "again": True})

    def _give_up(self, name: str, why: str) -> None:
        """A device that was coming back does not, for now."""
        assert self._returns is not None
        self._warn(f"device {name!r} does not come back yet: {why}")
        self._dismiss(name)
        self._returns.failed(name)

    def _warn(self, words: str) -> None:
        """Warns of why somebody does not come back: once, as who tries again says the same again and again."""
        log.log(logging.INFO if words in self._warned else logging.WARNING, "%s", words)
        self._warned.add(words)

    def _take_back(self, name: str) -> None:
        """From the next frame on a device takes part again."""
        assert self._returns is not None
        self._returns.back(name)
        self._warned.clear()
        self.away.discard(name)
        self._change(drop=False, back=name)
        self.told("return", name, "")
