"""Speeds of connections: slow links of hosts are found from the seconds in which bytes are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.onnx_models import parsed

import dicompiler
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.driver.problem_setup import on_platform
from dicompiler.ir.platform import Platform
from dicompiler.measure.connection_speeds import ARROW, fit_bandwidths, name_connection, predict_byte_seconds
from dicompiler.search.problem import plan_workload

STATED = dicompiler.Platform.load('rpi5x4{bandwidth="100 Mbit/s"}')


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with four tiles, which exchange rows of 36 KB."""
    weights = np.random.default_rng(0).standard_normal((32, 32, 3, 3)).astype(np.float32) / 32
    nodes = "".join(f"t{i} = Conv <pads = [1, 1, 1, 1]> ({f't{i - 1}' if i else 'x'}, w) " for i in range(4))
    model = parsed(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 32, 28, 280] x) => (float[1, 32, 28, 280] y) {{ {nodes} y = Relu (t3) }}""",
        w=weights,
    )
    directory = tmp_path_factory.mktemp("switch") / "net"
    dicompiler.compile(model, STATED, "modnn", output=directory, allow_worse=True)
    return directory


def with_bandwidth(host: str, bandwidth: float) -> Platform:
    hosts = (replace(entry, bandwidth=bandwidth) if entry.name == host else entry for entry in STATED.hosts)
    return replace(STATED, hosts=tuple(hosts))


@pytest.mark.parametrize("host", ["pi01", "pi03"])
@pytest.mark.parametrize("in_flight", [1, 12])
def test_slow_link_and_its_recovery_are_found(compiled: Path, host: str, in_flight: int) -> None:
    """The measured seconds are the prediction for a platform on which the link of one host is slower."""
    compilation, target, problem = reopen_artifact(compiled)
    assert compilation.plan is not None
    plan = compilation.plan

    def predict(platform: Platform) -> Mapping[str, float]:
        workload = plan_workload(on_platform(problem, platform, target), plan)[1]
        return predict_byte_seconds(workload, platform, in_flight)

    measured = predict(with_bandwidth(host, 30e6))
    assert len(measured) >= 6 and all(ARROW in name for name in measured)
    found = fit_bandwidths(STATED, STATED, measured, predict)
    changed = {entry.name: entry.bandwidth for entry in found.hosts if entry.bandwidth is not None}
    assert changed == {host: pytest.approx(30e6, rel=0.15)}
    assert fit_bandwidths(found, STATED, predict(STATED), predict) == STATED


def test_bandwidth_of_shared_medium_is_corrected_if_all_connections_differ() -> None:
    stated = replace(STATED, network=replace(STATED.network, kind="gateway"))
    half = replace(stated, network=replace(stated.network, bandwidth=50e6))
    names = [name_connection(a, b) for a, b in (("pi01", "pi02"), ("pi02", "pi03"), ("pi03", "pi01"))]

    def predict(platform: Platform) -> Mapping[str, float]:
        return {
            name: 1 / min(platform.link(*name.split(ARROW)).bandwidth, platform.network.bandwidth)  # type: ignore[union-attr]
            for name in names
        }

    assert fit_bandwidths(stated, stated, predict(half), predict) == half
    assert fit_bandwidths(half, stated, predict(stated), predict) == stated
    # Only one host has slow connections, so only its bandwidth is lowered.
    slow = replace(stated, hosts=(replace(stated.hosts[0], bandwidth=50e6), *stated.hosts[1:]))
    assert fit_bandwidths(stated, stated, predict(slow), predict) == slow
    assert fit_bandwidths(stated, stated, {}, predict) == stated


def test_single_slow_connection_lowers_the_bandwidth_of_one_of_its_hosts() -> None:
    """pi02 and pi03 have many fast connections, and pi04 has a single one."""
    pairs = [("pi01", "pi02"), ("pi02", "pi01"), ("pi01", "pi03"), ("pi03", "pi01"), ("pi02", "pi03"), ("pi03", "pi02")]
    predicted = {name_connection(a, b): 1e-8 for a, b in (*pairs, ("pi04", "pi01"))}
    measured = {**predicted, name_connection("pi03", "pi02"): 1.6e-8}
    found = fit_bandwidths(STATED, STATED, measured, lambda _: predicted)
    (changed,) = (host.name for host in found.hosts if host.bandwidth is not None)
    assert changed in ("pi02", "pi03")
