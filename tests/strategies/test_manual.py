"""The strategy `manual`: plan files, AutoDiCE's files, and one clear message for each mistake."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from support.layer_graphs import formed, stack

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.option_specs import instantiate, parse_spec
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.plan import Part, Plan, plan_to_text
from dicompiler.ir.platform import Platform, platform_from_toml, platform_to_toml, uniform_platform
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem
from dicompiler_strategies.autodice import (
    ASSUMPTION_NOTE,
    AutodiceHost,
    MappingKey,
    load_hosts,
    parse_key,
    platform_from_hosts,
    platform_from_mapping,
)
from dicompiler_strategies.manual import Manual

HOSTS = "nx01, arm, slots=0-5, gpu=NVIDIAVolta (CUDA)\n\n# a second board\nnx02,arm,slots=0-11\nold, x86, slots=2\n"


def layers() -> LayerGraph:
    """conv (with Relu) → conv → pool → fully connected; the names of the first nodes contain slashes."""
    return formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 3, 8, 8] x) => (float[1, 5] prob)
        {
          "/a/conv_out" = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
          "/a/relu_out" = Relu ("/a/conv_out")
          c2 = Conv <kernel_shape = [3, 3]> ("/a/relu_out", k)
          p = GlobalAveragePool (c2)
          f = Flatten (p)
          prob = Gemm (f, v)
        }""",
        w=(6, 3, 3, 3),
        k=(8, 6, 3, 3),
        v=(8, 5),
    )


MAPPING = {
    "nx02_arm012": ["_a_conv_out", "_a_relu_out"],
    "nx01_gpu": ["c2", "p"],
    "nx01_arm0": ["f", "prob"],
}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Write mapping.json and platform.txt."""
    mapping, hosts = tmp_path / "mapping.json", tmp_path / "platform.txt"
    mapping.write_text(json.dumps(MAPPING), encoding="utf-8")
    hosts.write_text(HOSTS, encoding="utf-8")
    return mapping, hosts


def rewritten(path: Path, document: object) -> str:
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def where(plan: Plan) -> dict[str, list[str]]:
    return {name: [part.device for part in parts] for name, parts in plan.layers.items()}


def test_uses_plan_file_unchanged(tmp_path: Path) -> None:
    graph = stack((1, 2, 4, 4), [("conv", 4, 3, 1, 1, 1)])
    plan = Plan({"conv1": (Part("d1"),)}, ("d0",), ("d1",), note="by hand")
    path = tmp_path / "plan.json"
    path.write_text(plan_to_text(plan), encoding="utf-8")
    assert Manual(file=str(path)).plan(Problem(graph, uniform_platform(2))) == plan
    with pytest.raises(DicompilerError, match=r"plan\.json: layers\.conv1\[0\]: platform 'uniform' has no device 'd1'"):
        Manual(file=str(path)).plan(Problem(graph, uniform_platform(1)))


def test_requires_either_plan_file_or_mapping() -> None:
    for spec in ("manual", "manual{file=a.json mapping=b.json}"):
        with pytest.raises(UsageError, match=r"give either file=PLAN\.json or mapping=MAPPING\.json"):
            instantiate(Manual, parse_spec(spec))
    with pytest.raises(UsageError, match=r"platform=PLATFORM\.txt needs mapping"):
        instantiate(Manual, parse_spec("manual{file=a.json platform=p.txt}"))


@pytest.mark.parametrize(
    ("text", "host", "kind", "cores"),
    [
        ("nx01_arm012", "nx01", "arm", (0, 1, 2)),
        ("my_host_cpu3", "my_host", "cpu", (3,)),
        ("nx01_gpu", "nx01", "gpu", ()),
        ("nx01_arm10,11", "nx01", "arm", (10, 11)),
        ("nx01_cpu10,", "nx01", "cpu", (10,)),
    ],
)
def test_keys_name_host_and_resource(text: str, host: str, kind: str, cores: tuple[int, ...]) -> None:
    assert parse_key(text, "m") == MappingKey(text, host, kind, cores)


@pytest.mark.parametrize("text", ["nx01", "nx01_npu", "nx01_arm", "_gpu", "nx01_arm1x", "nx01_gpu0"])
def test_rejects_unknown_resource(text: str) -> None:
    with pytest.raises(DicompilerError, match=r"^m: key .* does not name a resource: write <host>_gpu, <host>_arm012"):
        parse_key(text, "m")


def test_rejects_core_named_twice() -> None:
    with pytest.raises(DicompilerError, match="names a core twice: write cores above 9 as a list"):
        parse_key("nx01_arm11", "m")


def test_platform_txt_is_read_line_by_line(files: tuple[Path, Path]) -> None:
    assert load_hosts(files[1]) == (
        AutodiceHost("nx01", "arm", range(6), "NVIDIAVolta (CUDA)"),
        AutodiceHost("nx02", "arm", range(12), None),
        AutodiceHost("old", "x86", range(2, 3), None),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nx01 arm slots=0-5", r":1: 'nx01 arm slots=0-5' is not a host: write 'name, architecture, slots=0-5'"),
        ("nx01, arm, slots=5-0", r":1: slots=5-0: the first core comes after the last"),
        ("a, arm, slots=0\na, arm, slots=0", r":2: host 'a' is listed twice"),
        ("\n# nothing\n", ": no hosts: write lines such as"),
    ],
)
def test_rejects_wrong_line_of_platform_txt(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "platform.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DicompilerError, match=expected):
        load_hosts(path)


def test_mapping_and_platform_txt_give_one_device_per_key(files: tuple[Path, Path]) -> None:
    platform = platform_from_mapping(*files)
    assert [(device.name, device.host) for device in platform.devices] == [
        ("nx02_arm012", "nx02"),
        ("nx01_gpu", "nx01"),
        ("nx01_arm0", "nx01"),
    ]
    assert [(device.cores, device.gpu) for device in platform.devices] == [(3, False), (1, True), (1, False)]
    assert [host.name for host in platform.hosts] == ["nx01", "nx02", "old"]
    assert platform.description == ASSUMPTION_NOTE
    assert platform.device("nx02_arm012").rate == pytest.approx(3 * platform.device("nx01_arm0").rate)
    assert platform_from_toml(platform_to_toml(platform)) == platform
    assert Manual(mapping=str(files[0]), platform=str(files[1])).own_platform() == platform
    assert Manual(mapping=str(files[0])).own_platform() is None


def test_platform_txt_alone_gives_one_device_for_cores_and_gpu(files: tuple[Path, Path]) -> None:
    platform = platform_from_hosts(files[1])
    assert [(device.name, device.cores) for device in platform.devices] == [
        ("nx01_arm012345", 6),
        ("nx01_gpu", 1),
        ("nx02_arm0-1-2-3-4-5-6-7-8-9-10-11", 12),
        ("old_cpu2", 1),
    ]
    assert platform_from_toml(platform_to_toml(platform)) == platform
    doors = [provided.value for provided in registry().platforms.values()]
    assert Platform.load(files[1], doors) == platform


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("nx03_gpu", r"unknown host 'nx03' \(did you mean 'nx0"),
        ("nx02_gpu", r"host 'nx02' has no GPU in the platform file \(it has cores 0 to 11\)"),
        ("nx01_arm6", r"host 'nx01' has no core 6 \(it has cores 0 to 5\)"),
        ("old_arm2", r"processor of host 'old' is x86, not arm: write 'cpu' instead of 'arm'"),
        ("old_cpu0", r"host 'old' has no core 0 \(it has core 2\)"),
    ],
)
def test_rejects_key_without_resource_in_platform_txt(files: tuple[Path, Path], key: str, expected: str) -> None:
    mapping = rewritten(files[0], {key: []})
    with pytest.raises(DicompilerError, match=expected):
        platform_from_mapping(mapping, files[1])


def test_mapping_places_each_layer_under_its_key(files: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    strategy = Manual(mapping=str(files[0]), platform=str(files[1]))
    platform = strategy.own_platform()
    assert platform is not None
    plan = strategy.plan(Problem(layers(), platform))
    assert list(where(plan).values()) == [["nx02_arm012"], ["nx01_gpu"], ["nx01_gpu"], ["nx01_arm0"], ["nx01_arm0"]]
    assert plan.source == plan.sink == ("nx02_arm012",)
    assert caplog.messages == []


def test_finds_nodes_by_name_and_output_with_or_without_slashes(files: tuple[Path, Path]) -> None:
    platform = platform_from_mapping(*files)
    expected = Manual(mapping=str(files[0])).plan(Problem(layers(), platform))
    for first in ("/a/conv_out", "conv0"):
        mapping = rewritten(files[0], {**MAPPING, "nx02_arm012": [first]})
        assert Manual(mapping=mapping).plan(Problem(layers(), platform)) == expected


def test_without_platform_txt_a_key_means_the_hosts_gpu_or_cores(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="dicompiler"):
        plan = Manual(mapping=str(files[0])).plan(Problem(layers(), Platform.load("jetson-nx2")))
    assert list(where(plan).values()) == [["nx02_cpu"], ["nx01_gpu"], ["nx01_gpu"], ["nx01_cpu"], ["nx01_cpu"]]
    assert caplog.messages == [
        "mapping: key nx02_arm012 is device nx02_cpu, which has 6 cores",
        "mapping: key nx01_arm0 is device nx01_cpu, which has 6 cores",
    ]


def test_warns_of_keys_with_the_same_device(files: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    mapping = rewritten(files[0], {"nx01_arm0": ["conv0", "c2"], "nx01_arm1": ["c2", "p", "f", "prob"]})
    with caplog.at_level(logging.WARNING, logger="dicompiler"):
        plan = Manual(mapping=mapping).plan(Problem(layers(), Platform.load("jetson-nx1")))
    assert {device for devices in where(plan).values() for device in devices} == {"nx01_cpu"}
    assert caplog.messages[0] == "mapping: keys nx01_arm0 and nx01_arm1 are both device nx01_cpu"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("pi07_arm0", r"platform 'rpi4x2' has no host 'pi07' \(did you mean 'pi0"),
        ("pi01_gpu", r"host 'pi01' has no GPU on platform 'rpi4x2' \(its devices: pi01\)"),
    ],
)
def test_rejects_key_that_is_not_on_the_platform(files: tuple[Path, Path], key: str, expected: str) -> None:
    mapping = rewritten(files[0], {key: ["conv0", "c2", "p", "f", "prob"]})
    with pytest.raises(DicompilerError, match=expected):
        Manual(mapping=mapping).plan(Problem(layers(), Platform.load("rpi4x2")))


def test_layer_under_two_keys_is_cut_by_channels_with_a_warning(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    mapping = rewritten(files[0], {**MAPPING, "nx02_arm012": ["conv0", "c2"]})
    with caplog.at_level(logging.WARNING, logger="dicompiler"):
        plan = Manual(mapping=mapping).plan(Problem(layers(), platform_from_mapping(*files)))
    assert [(part.device, part.region) for part in plan.layers["conv2"]] == [
        ("nx02_arm012", ((0, 1), (0, 4), (0, 6), (0, 6))),
        ("nx01_gpu", ((0, 1), (4, 8), (0, 6), (0, 6))),
    ]
    assert caplog.messages == ["mapping: layer conv2 is under 2 keys: cut by output channels (LOP)"]


def test_rejects_two_keys_for_a_layer_without_channels(tmp_path: Path) -> None:
    graph = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[4, 4] x) => (float[4, 4] y)
        { y = Softmax <axis = 1> (x) }"""
    )
    mapping = rewritten(tmp_path / "m.json", {"pi01_arm0123": ["y"], "pi02_arm0123": ["y"]})
    with pytest.raises(
        DicompilerError, match=r"m\.json: layer 'softmax0' is under 2 keys, but its channels cannot be cut"
    ):
        Manual(mapping=mapping).plan(Problem(graph, Platform.load("rpi4x2")))


def test_fused_node_follows_its_anchor_with_a_warning(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    moved = {**MAPPING, "nx02_arm012": ["conv0"], "nx01_arm0": ["relu1", "f", "prob"]}
    mapping = rewritten(files[0], moved)
    with caplog.at_level(logging.WARNING, logger="dicompiler"):
        plan = Manual(mapping=mapping).plan(Problem(layers(), platform_from_mapping(*files)))
    assert where(plan)["conv0"] == ["nx02_arm012"]
    assert caplog.messages == ["mapping: node relu1 (Relu) is fused into conv0 and follows it, not nx01_arm0"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"nx01_gpu": ["c2"]}, r"layer 'p' \(node 'globalaveragepool3'\) is missing: add it to a device"),
        ({"nx01_gpu": ["c2", "p", "fc"]}, r"key 'nx01_gpu': unknown layer 'fc'"),
        ({"nx01_gpu": ["conv_2", "p"]}, r"unknown layer 'conv_2' \(did you mean 'conv2'\?\)"),
        ({"nx01_gpu": "c2"}, r"key 'nx01_gpu': expected a list of layers' names"),
        ({"nx01": ["c2"]}, r"key 'nx01' does not name a resource"),
    ],
)
def test_each_mistake_in_a_mapping_is_one_message(
    files: tuple[Path, Path], change: dict[str, object], expected: str
) -> None:
    mapping = rewritten(files[0], {**MAPPING, **change})
    with pytest.raises(DicompilerError, match=expected) as caught:
        Manual(mapping=mapping).plan(Problem(layers(), Platform.load("jetson-nx2")))
    assert str(caught.value).startswith(f"{mapping}: ")
    assert "\n" not in str(caught.value)


def test_rejects_ambiguous_underscored_name(tmp_path: Path) -> None:
    graph = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 2] x) => (float[1, 2] y)
        { "a/b/c" = Softmax (x)  "a/b_c" = Softmax ("a/b/c")  y = Softmax ("a/b_c") }"""
    )
    mapping = rewritten(tmp_path / "m.json", {"pi01_arm0123": ["a_b_c", "y"]})
    with pytest.raises(DicompilerError, match="'a_b_c' can be any of softmax0, softmax1: write it with its /"):
        Manual(mapping=mapping).plan(Problem(graph, Platform.load("rpi4x1")))


def test_rejects_empty_mapping(tmp_path: Path) -> None:
    documents: tuple[object, ...] = ({}, [])
    for document in documents:
        mapping = rewritten(tmp_path / "m.json", document)
        with pytest.raises(DicompilerError, match="expected an object such as"):
            Manual(mapping=mapping).plan(Problem(layers(), Platform.load("rpi4x1")))
