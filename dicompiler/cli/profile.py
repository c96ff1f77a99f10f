"""`dicompiler profile`: measure a network's layers on this device or on boards over ssh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.atomic_output import check_writable
from dicompiler.base.errors import UsageError
from dicompiler.base.units import format_number
from dicompiler.cli.options import (
    PATH,
    check_output_file,
    json_option,
    model_argument,
    output_option,
    refuse_options,
    shape_options,
    timeout_option,
)

if TYPE_CHECKING:
    from dicompiler.cost.profile import Profile


@click.command("profile")
@model_argument
@shape_options
@output_option(metavar="PROFILE.json", help="Write the profile to this file.")
@click.option(
    "--package",
    metavar="DIR",
    type=PATH,
    help="Measure nothing; write a package to DIR that measures on another device.",
)
@click.option("--tiles", default="1,2,3,4,6,8", show_default=True, help="Cut each layer into these numbers of pieces.")
@click.option(
    "--repeat",
    type=click.IntRange(1, 100_000),
    default=7,
    show_default=True,
    help="Time each piece this many times. The whole network is timed for REPEAT/7 s.",
)
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="Run a piece with this many threads. Default: all processors."
)
@click.option(
    "--device",
    metavar="NAME",
    help="Name the platform's devices to which the profile applies; * and ? match several. Default: this host.",
)
@click.option(
    "--target",
    "targets",
    metavar="NAME",
    multiple=True,
    default=("sockets",),
    show_default=True,
    help="Measure the runtime of this target too; none: no runtime. Can be repeated.",
)
@click.option("--hosts", metavar="HOSTS.toml", type=PATH, help="Measure these boards and their links, over ssh.")
@click.option("--platform", metavar="P", help="With --hosts: correct this platform. Default: a new platform.")
@click.option(
    "--log",
    "logs",
    metavar="RUN.json",
    type=PATH,
    multiple=True,
    help="With --hosts: calibrate with this run. Can be repeated.",
)
@click.option("--force", is_flag=True, help="With --hosts: use the measurements of boards that were busy or throttled.")
@timeout_option(help="With --hosts: stop after S seconds per board. Default: 3600.")
@json_option
def command(
    model: Path,
    shape: tuple[str, ...],
    state: tuple[str, ...],
    output: Path | None,
    package: Path | None,
    tiles: str,
    repeat: int,
    threads: int | None,
    device: str | None,
    targets: tuple[str, ...],
    hosts: Path | None,
    platform: str | None,
    logs: tuple[Path, ...],
    force: bool,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Measure a model's layers, pieces of them, and the overhead of runtimes.

    Use the profile with --cost 'profile{file=PROFILE.json}' or --cost 'linear{file=PROFILE.json}'.

    Measures each engine that is installed: onnxruntime, and others (see 'dicompiler list engines').

    With --package, writes a directory for a device that has only Python, numpy and onnxruntime. Copy the directory to
    the device and run its profile_run.py, which measures there. This script also measures the links between hosts.

    With --hosts, measures over ssh on one board after another. In this case, -o names the platform file with the
    measured rates and links, and the profiles are written to a directory next to this file.

    Example: dicompiler profile model.onnx --hosts hosts.toml -o cluster.toml
    """
    needs_hosts = platform is not None or bool(logs) or force or timeout_s is not None
    _check_output_options(output, package, hosts, device, needs_hosts)
    write = _load_package(model, shape, state, _PackageOptions(_parse_tiles(tiles), device or "", targets))
    if package is not None:
        _write_package(write, package, as_json)
    elif output is not None and hosts is not None:
        from dicompiler.cli.profile_boards import ProfileBoardsOptions, profile_boards

        profile_boards(
            ProfileBoardsOptions(hosts, platform, logs, force, timeout_s or 3600.0, threads, repeat),
            output,
            as_json,
            write,
        )
    elif output is not None:
        _measure_here(write, output, threads, repeat, as_json)


def _check_output_options(
    output: Path | None, package: Path | None, hosts: Path | None, device: str | None, needs_hosts: bool
) -> None:
    """Raise an error if options exclude each other, or if the output cannot be written.

    Args:
        output: The option --output.
        package: The option --package.
        hosts: The option --hosts.
        device: The option --device.
        needs_hosts: Whether an option is given that needs --hosts.
    """
    from dicompiler.measure.profile_package import check_package_path

    if (output is None) == (package is None):
        raise UsageError("profile: give either -o PROFILE.json or --package DIR")
    if hosts is None and needs_hosts:
        raise UsageError("profile: --platform, --log, --force and --timeout need --hosts")
    if hosts is not None and (output is None or device is not None):
        raise UsageError("profile: --hosts needs -o PLATFORM.toml and excludes --device")
    if package is not None:
        refuse_options("--package measures nothing", "repeat", "threads")
    check_writable(output or package)
    if package is not None:
        check_package_path(package)
    check_output_file(output)


@dataclass(frozen=True)
class _PackageOptions:
    """Options of a measurement package.

    Attributes:
        tiles: Numbers of tiles into which each layer is cut.
        device: Name of the platform's devices that the profile is for; empty for the host that measures.
        targets: Names of the targets of which the runtimes are measured.
    """

    tiles: tuple[int, ...]
    device: str
    targets: tuple[str, ...]


def _load_package(
    model: Path, shape: tuple[str, ...], state: tuple[str, ...], options: _PackageOptions
) -> Callable[[Path], None]:
    """Read a model, and return a function that writes its measurement package to an empty directory."""
    from dicompiler.cli.progress import progress
    from dicompiler.driver.prepare import prepare
    from dicompiler.ir.cluster import DEFAULT_ENGINE
    from dicompiler.ir.onnx.model import Model
    from dicompiler.measure.profile_package import write_package
    from dicompiler.plugin.registry import registry

    targets = [registry().make("targets", name) for name in dict.fromkeys(options.targets) if name != "none"]
    engines = [registry().make("engines", name) for name in registry().engines if name != DEFAULT_ENGINE]
    with progress(f"reading {model.name}"):
        compilation = prepare(Model.load(model), shape, state=state)
    return lambda directory: write_package(compilation, directory, options.tiles, options.device, targets, engines)


def _write_package(write: Callable[[Path], None], package: Path, as_json: bool) -> None:
    """Write the package that measures layers on another device, and print how to use it."""
    from dicompiler.base.atomic_output import atomic_file
    from dicompiler.cli.table import print_json
    from dicompiler.measure import profile_package as profiling

    with atomic_file(package) as stage:
        stage.mkdir()
        write(stage)
    if as_json:
        print_json({"package": str(package)})
    else:
        click.echo(f"written: {package}; on the device: python3 {profiling.SCRIPT_FILE} -o PROFILE.json --device NAME")


def _measure_here(write: Callable[[Path], None], output: Path, threads: int | None, repeat: int, as_json: bool) -> None:
    import logging
    import tempfile
    from dataclasses import replace

    from dicompiler.base.atomic_output import atomic_file
    from dicompiler.cli.progress import progress
    from dicompiler.cli.table import print_json
    from dicompiler.cost.profile import load_profile
    from dicompiler.measure import profile_package as profiling

    scratch = tempfile.TemporaryDirectory(prefix="dicompiler-")
    with scratch as temporary, atomic_file(output) as result, progress("making pieces of the layers") as tell:
        write(Path(temporary))
        profiling.run_package(Path(temporary), result, threads, repeat, tell)
        profile = replace(load_profile(result), place=str(output))
    if profile.busy_message:
        logging.getLogger("dicompiler").warning(profile.busy_message)
    if as_json:
        print_json({"profile": str(output), **_profile_document(profile)})
        return
    click.echo(_summarize_profile(profile))
    click.echo(f"written: {output}")


def _profile_document(profile: Profile) -> dict[str, Any]:
    from dicompiler.cost.profile_accuracy import fit_roofline, interpolation_error, linear_fit_error

    layers = profile.layers.values()
    return {
        "device": profile.device,
        "threads": profile.threads,
        "layers": sum(len(layer.names) for layer in layers),
        "distinct_layers": len(layers),
        "pieces": sum(len(layer.measurements) for layer in layers),
        "total_s": profile.isolated_s,
        "whole_model_s": profile.whole_model_s,
        "engines": {name: _engine_document(profile.of_engine(name)) for name in profile.engines},
        "errors": {
            name: None if errors is None else asdict(errors)
            for name, errors in (
                ("between_sizes", interpolation_error(profile)),
                ("linear", linear_fit_error(profile)),
                ("roofline", fit_roofline(profile)),
            )
        },
        "runtime_costs": profile.runtime_costs,
        "unmeasured_runtimes": [
            {"target": target, "reason": reason} for target, reason in profile.unmeasured_runtimes.items()
        ],
        "unmeasured": [{"name": name, "reason": reason} for name, reason in profile.unmeasured.items()],
    }


def _engine_document(profile: Profile) -> dict[str, Any]:
    return {"total_s": profile.isolated_s, "whole_model_s": profile.whole_model_s}


def _summarize_profile(profile: Profile) -> str:
    from dicompiler.cli.table import wrap_text

    numbers = _profile_document(profile)
    lines = [
        f"{numbers['layers']} layers, {numbers['distinct_layers']} distinct, {numbers['pieces']} pieces on "
        f"{profile.threads} threads, for device {profile.device}: all layers in sequence take "
        f"{format_number(1000 * numbers['total_s'])} ms"
    ]
    if profile.whole_model_s is not None:
        lines[0] += f", in one session {format_number(1000 * profile.whole_model_s)} ms"
    for engine, times in numbers["engines"].items():
        whole = times["whole_model_s"]
        together = "" if whole is None else f", in one session {format_number(1000 * whole)} ms"
        lines.append(
            f"in engine {engine}: all layers in sequence take {format_number(1000 * times['total_s'])} ms{together}"
        )
    if profile.unmeasured:
        name, reason = next(iter(profile.unmeasured.items()))
        more = f" and {len(profile.unmeasured) - 1} more" if len(profile.unmeasured) > 1 else ""
        lines.append(f"not measured: {name}{more}: {reason}")
    lines += _error_lines(numbers["errors"])
    lines += [f"not measured: runtime of {name}: {reason}" for name, reason in profile.unmeasured_runtimes.items()]
    lines += [f"runtime of {target}: {_format_runtime_costs(costs)}" for target, costs in profile.runtime_costs.items()]
    return "\n".join(map(wrap_text, lines))


def _error_lines(errors: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about the prediction errors of the cost models that use the profile, if any is known."""
    texts = []
    if (off := errors["between_sizes"]) is not None:
        texts.append(f"parts between measured sizes {_format_error(off)}")
    if (off := errors["linear"]) is not None:
        texts.append(f"linear {_format_error(off)}")
    if (roof := errors["roofline"]) is not None:
        bandwidth = format_number(roof["memory_bandwidth"] / 1e9, 3)
        rates = f"{format_number(roof['rate'] / 1e9, 3)} GFLOP/s and {bandwidth} GB/s"
        texts.append(f"roofline of {rates} {_format_error(roof['error'])}")
    if texts:
        yield f"errors (median and worst): {'; '.join(texts)}"


def _format_error(error: Mapping[str, float]) -> str:
    return f"{format_number(100 * error['median'], 2)} and {format_number(100 * error['worst'], 3)} %"


def _format_runtime_costs(costs: Mapping[str, float]) -> str:
    from dicompiler.base.units import format_seconds

    texts = {
        "send": "{} to send a message",
        "latency": "{} to wake its receiver",
        "receive": "{} to receive it",
        "per_byte": "{} for each byte at each end",
        "call": "{} for a call",
        "per_copy": "{} for a slice or join",
        "per_copied_byte": "{} for each byte of it",
    }
    return ", ".join(text.format(format_seconds(costs[name])) for name, text in texts.items() if name in costs)


def _parse_tiles(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= 1024 for number in numbers):
        raise UsageError(f"profile: --tiles must be numbers from 1 to 1024 separated by commas, not {text!r}")
    return numbers
