"""The files of a package that are not segments: where ranks run, who sends what to whom, and how it is started.

In: a Program and the place of each rank. Out: text, the same for the same program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from dicompiler.plugin_api import Platform, Program
from dicompiler_targets.mpi.codegen import RankPlacement

RUN_SCRIPT = """\
#!/bin/sh
# Builds the program of this package and starts it. `./run.sh build` on every host, into the same directory on each;
# then `./run.sh --inputs IMAGES --outputs DIR` on one that reaches the others by ssh. `./run.sh --help` says more.
set -eu
last=
for word in "$@"; do # paths are those of where we are called
  shift
  case $last in --inputs | --outputs) case $word in /*) ;; *) word=$PWD/$word ;; esac ;; esac
  set -- "$@" "$word"
  last=$word
done
cd "$(dirname "$0")"
for tool in cmake mpirun; do
  command -v "$tool" >/dev/null || {
    echo "run.sh: $tool is missing: on Debian 'apt install g++ cmake make openmpi-bin libopenmpi-dev'" >&2
    exit 1
  }
done
if [ ! -x build/program ] || [ main.cc -nt build/program ]; then
  { cmake -S . -B build && cmake --build build; } >&2
fi
if [ "${1:-}" = build ]; then exit 0; fi

# Options are called otherwise from Open MPI 5 on.
case $(mpirun --version | head -n 1) in
  *" 4."* | *" 3."*) place="--rankfile rankfile" ;;
  *) place="--map-by rankfile:file=rankfile" ;;
esac
# Collective operations by hosts hang where hosts bear the same name, as new boards do.
export OMPI_MCA_coll="${OMPI_MCA_coll:-^han}"
if [ "$(id -u)" = 0 ]; then place="$place --allow-run-as-root"; fi
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
code=0
# shellcheck disable=SC2086  # it is several words
mpirun --hostfile hostfile $place -n @COUNT@ "$PWD/build/program" "$@" 2>"$errors" || code=$?
if [ "$code" = 0 ]; then exit 0; fi
if ! grep -a -m 1 '^dicompiler: ' "$errors" >&2; then
  found=$(tr '\\n' ' ' <"$errors" | sed -nE 's/.*rank ([0-9]+) .*(signal [0-9]+).*/\\1 \\2/p')
  case ${found%% *} in
@CASES@
    *) cat "$errors" >&2 ;;
  esac
fi
exit "$code"
"""


def make_run_script(places: Sequence[RankPlacement]) -> str:
    """run.sh."""
    cases = [
        f"    {rank}) echo \"dicompiler: rank {rank} (device '{place.device}' on host '{place.host}'): "
        f'its process was ended by ${{found#* }}" >&2 ;;'
        for rank, place in enumerate(places)
    ]
    return RUN_SCRIPT.replace("@COUNT@", str(len(places))).replace("@CASES@", "\n".join(cases))


def place_ranks(program: Program, platform: Platform | None, threads: int) -> tuple[RankPlacement, ...]:
    """The place of each rank: rank i is the program's device i.

    A device that is called after its cores, as AutoDiCE calls it (`nx01_arm012`, `nx01_cpu10-11`), has those; others
    of its host have the next ones that nobody has, in order, and a GPU one for its process. `threads`: of a segment, 0:
    as many as the device has cores. A device that is not on the platform has one core.
    """
    known = {device.name: device for device in platform.devices} if platform is not None else {}
    named = {device.device: _parse_cores(device.device, device.host) for device in program.devices}
    used: dict[str, set[int]] = {}
    for device in program.devices:
        used.setdefault(device.host, set()).update(named[device.device])
    places = []
    for device in program.devices:
        about, cores = known.get(device.device), named[device.device]
        gpu, count = (about.gpu, about.cores) if about is not None else (False, 1)
        if gpu or len(cores) != count:
            first = 1 + max(used[device.host], default=-1)
            cores = tuple(range(first, first + (1 if gpu else count)))
            used[device.host].update(cores)
        places.append(RankPlacement(device.device, device.host, cores, 1 if gpu else threads or count, gpu))
    return tuple(places)


def _parse_cores(device: str, host: str) -> tuple[int, ...]:
    match = re.fullmatch(re.escape(host) + r"_(?:arm|cpu)(\d+(?:-\d+)*-?)", device)
    if match is None:
        return ()
    return tuple(int(core) for core in (match[1].strip("-").split("-") if "-" in match[1] else match[1]))


def make_rankfile(places: Sequence[RankPlacement]) -> str:
    """Open MPI's rankfile: host and cores of each rank."""
    return "".join(
        f"rank {rank}={place.host} slot={','.join(map(str, place.cores))}\n" for rank, place in enumerate(places)
    )


def make_hostfile(places: Sequence[RankPlacement]) -> str:
    """Open MPI's hostfile: the hosts and how many ranks each has."""
    hosts = [place.host for place in places]
    return "".join(f"{host} slots={hosts.count(host)}\n" for host in dict.fromkeys(hosts))


def make_sender_table(program: Program) -> str:
    """sender.json: by device, each tensor that it sends and the ranks that it goes to."""
    return _make_table(program, "sender", "receiver")


def make_receiver_table(program: Program) -> str:
    """receiver.json: by device, each tensor that it receives and the rank that it comes from."""
    return _make_table(program, "receiver", "sender")


def _make_table(program: Program, end: str, other: str) -> str:
    ranks = {device.device: rank for rank, device in enumerate(program.devices)}
    table: dict[str, dict[str, list[int]]] = {device: {} for device in ranks}
    for transfer in program.all_transfers:
        peers = table[getattr(transfer, end)].setdefault(transfer.value.name, [])
        if ranks[getattr(transfer, other)] not in peers:  # replicas may do the same
            peers.append(ranks[getattr(transfer, other)])
    return _format_rows(table)


def _format_rows(table: Mapping[str, object]) -> str:
    """A JSON object with one entry per line."""
    rows = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"
