"""The text files of a package, which is the directory of one host in an artifact.

They are the placement of the ranks (MPI processes), the tables of sent tensors, and the run script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from dicompiler.plugin_api import Platform, Program
from dicompiler_targets.mpi.codegen import RankPlacement

RUN_SCRIPT = """\
#!/bin/sh
# Builds the program of this package and starts it. Copy the packages to the same directory on each host, and run
# `./run.sh build` there. Then run `./run.sh --inputs IMAGES --outputs DIR` on a host that reaches the other hosts by
# ssh. `./run.sh --help` prints all options.
set -eu
last=
help=
for word in "$@"; do # makes paths absolute, because cd follows
  shift
  case $last in --inputs | --outputs) case $word in /*) ;; *) word=$PWD/$word ;; esac ;; esac
  case $word in --help | -h) help=yes ;; esac
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
if [ ! -x build/program ] || [ "$(find main.cc CMakeLists.txt runtime -newer build/program)" ]; then
  cmake -S . -B build >&2
  cmake --build build >&2
fi
if [ "${1:-}" = build ]; then exit 0; fi
if [ "$help" ]; then exec build/program --help; fi

# Open MPI 5 has renamed the option for the rankfile.
case $(mpirun --version | head -n 1) in
  *" 4."* | *" 3."*) place="--rankfile rankfile" ;;
  *) place="--map-by rankfile:file=rankfile" ;;
esac
# Open MPI's component "han" hangs if several hosts have the same name, as new boards do.
export OMPI_MCA_coll="${OMPI_MCA_coll:-^han}"
if [ "$(id -u)" = 0 ]; then place="$place --allow-run-as-root"; fi
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
code=0
# shellcheck disable=SC2086  # $place must be split into several arguments
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


def make_run_script(placements: Sequence[RankPlacement]) -> str:
    cases = [
        f"    {rank}) echo \"dicompiler: rank {rank} (device '{placement.device}' on host '{placement.host}'): "
        f'its process was ended by ${{found#* }}" >&2 ;;'
        for rank, placement in enumerate(placements)
    ]
    return RUN_SCRIPT.replace("@COUNT@", str(len(placements))).replace("@CASES@", "\n".join(cases))


def place_ranks(program: Program, platform: Platform | None, threads: int) -> tuple[RankPlacement, ...]:
    """Return the placement of each rank (MPI process); rank i runs device i of the program.

    The name of a device may list its cores, as in AutoDiCE: `nx01_arm012` or `nx01_cpu10-11`. Other devices get the
    next free cores of their host. A GPU gets one core for its process.

    Args:
        program: The program of all devices.
        platform: The platform, with the cores of each device. A device that it does not describe gets one core.
        threads: Number of threads that compute a segment (an ONNX submodel); 0: as many as the device has cores.
    """
    descriptions = {device.name: device for device in platform.devices} if platform is not None else {}
    named_cores = {device.device: _parse_cores(device.device, device.host) for device in program.devices}
    used: dict[str, set[int]] = {}
    for device in program.devices:
        used.setdefault(device.host, set()).update(named_cores[device.device])
    placements = []
    for device in program.devices:
        description, cores = descriptions.get(device.device), named_cores[device.device]
        is_gpu, count = (description.gpu, description.cores) if description is not None else (False, 1)
        if is_gpu or len(cores) != count:
            first = 1 + max(used[device.host], default=-1)
            cores = tuple(range(first, first + (1 if is_gpu else count)))
            used[device.host].update(cores)
        placements.append(RankPlacement(device.device, device.host, cores, 1 if is_gpu else threads or count, is_gpu))
    return tuple(placements)


def _parse_cores(device: str, host: str) -> tuple[int, ...]:
    """Return the indices of the cores in a device's name, such as nx01_cpu10-11; empty if there are none."""
    match = re.fullmatch(re.escape(host) + r"_(?:arm|cpu)(\d+(?:-\d+)*-?)", device)
    if match is None:
        return ()
    return tuple(int(core) for core in (match[1].strip("-").split("-") if "-" in match[1] else match[1]))


def make_rankfile(placements: Sequence[RankPlacement]) -> str:
    return "".join(
        f"rank {rank}={placement.host} slot={','.join(map(str, placement.cores))}\n"
        for rank, placement in enumerate(placements)
    )


def make_hostfile(placements: Sequence[RankPlacement]) -> str:
    hosts = [placement.host for placement in placements]
    return "".join(f"{host} slots={hosts.count(host)}\n" for host in dict.fromkeys(hosts))


def make_transfer_table(program: Program, end: str, other_end: str) -> str:
    """Return a JSON table of the ranks with which each device exchanges each tensor, by device and tensor name.

    With `end` "sender" and `other_end` "receiver", the table has the sent tensors; with exchanged arguments, the
    received ones.
    """
    ranks = {device.device: rank for rank, device in enumerate(program.devices)}
    table: dict[str, dict[str, list[int]]] = {device: {} for device in ranks}
    for transfer in program.all_transfers:
        peers = table[getattr(transfer, end)].setdefault(transfer.value.name, [])
        peer = ranks[getattr(transfer, other_end)]
        if (
            peer not in peers
        ):  # Several replicas of a plan may send the same tensor to the same rank; it is listed once.
            peers.append(peer)
    rows = [f" {json.dumps(device)}: {json.dumps(tensors)}" for device, tensors in table.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"
