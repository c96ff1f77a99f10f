"""Errors of third-party plugins: one line with the plugin, its distribution and version, and exit code 1."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest

from dicompiler import networks
from dicompiler.cli import main
from dicompiler.plugin.registry import load_installed

SOURCE = """
import math
from dataclasses import dataclass, replace
from dicompiler.plugin_api import CostModel
from dicompiler.plugin_api import DicompilerError
from dicompiler.plugin_api import hookimpl
from dicompiler.plugin_api import OperatorRule, Piece
from dicompiler.plugin_api import Pass
from dicompiler.plugin_api import Part
from dicompiler.plugin_api import PlatformFamily
from dicompiler.plugin_api import Strategy
from dicompiler.plugin_api import Target

def helper(known):
    return known["pi99"]

@dataclass(frozen=True)
class Decides(Strategy):
    name = "bad-strategy"
    how: str = "raise"

    def __post_init__(self):
        if self.how == "init":
            helper({})

    def plan(self, problem):
        whole = {layer.name: (Part("pi01"),) for layer in problem.layers.layers}
        first = problem.layers.layers[0].name
        return {
            "raise": lambda: helper({}),
            "exit": lambda: exit(3),
            "file": lambda: open("/nowhere/at/all"),
            "none": lambda: None,
            "unknown": lambda: problem.build_plan({**whole, first: (Part("pi07"),)}),
            "outside": lambda: problem.build_plan(
                {**whole, first: (Part("pi01", ((0, 1), (0, 99), (0, 99), (0, 99))),)}
            ),
            "garbage": lambda: problem.build_plan({**whole, first: ("pi01",)}),
            "forgets": lambda: problem.build_plan({first: whole[first]}),
            "says": lambda: (_ for _ in ()).throw(DicompilerError("bad-strategy: no plan: take another")),
        }[self.how]()

@dataclass(frozen=True)
class Emits(Target):
    name = "bad-target"
    how: str = "raise"

    def emit(self, compilation, directory):
        if self.how == "raise":
            helper({})
        if self.how == "foreign":
            from dicompiler.plugin_api import registry
            registry().make("targets", "sockets").emit(compilation, directory)
        if self.how == "runs":
            from dicompiler.plugin_api import registry
            registry().make("targets", "sockets").emit(compilation, directory)
            text = (directory / "artifact.json").read_text()
            (directory / "artifact.json").write_text(text.replace('"sockets"', '"bad-target"'))

    def run(self, directory, frames, options):
        helper({})

    def memory_overhead(self, program):
        known = super().memory_overhead(program)
        return {"memory": {}, "negative": dict.fromkeys(known, -1), "list": [1]}.get(self.how, known)

    def device_footprints(self, program):
        return {"pi01": 3} if self.how == "footprints" else ()

    @property
    def runtime_costs(self):
        return "fast" if self.how == "fast" else super().runtime_costs

@dataclass(frozen=True)
class Costs(CostModel):
    name = "bad-cost"
    how: str = "raise"

    def runtime_costs(self, device, stated, target):
        return None if self.how == "runtime" else stated

    def seconds(self, layers, layer, share, device):
        if self.how == "runtime":
            return 1e-3
        return {"negative": -1.0, "nan": math.nan, "none": None}[self.how] if self.how != "raise" else helper({})

@dataclass(frozen=True)
class Changes(Pass):
    name = "bad-pass"
    how: str = "raise"

    def run(self, compilation):
        if self.how == "text":
            return replace(compilation, plan="hello")
        if self.how == "in_place":
            del compilation.model.proto.graph.node[0]
            return compilation
        if self.how == "illegal":
            proto = type(compilation.model.proto)()
            proto.CopyFrom(compilation.model.proto)
            del proto.graph.node[0]
            return replace(compilation, model=replace(compilation.model, proto=proto))
        return helper({})

def rule(operation, region, reduce):
    alpha = operation.attribute("alpha")
    if alpha == 1.0:
        helper({})
    if alpha == 2.0:
        return Piece(region[:-1] + ((0, 1),), (region,))
    if alpha == 3.0:
        return Piece(region, (region[:-1] + ((0, 99),),))
    if alpha == 4.0:
        return Piece(region, ())
    if alpha == 5.0:
        return Piece(region, (region[:-1] + ((3, 3),),))
    if alpha == 6.0:
        return Piece(region, (list(region),))
    if alpha == 7.0:
        return Piece(tuple((float(start), float(stop)) for start, stop in region), (region,))
    if alpha == 8.0:
        return Piece(region, (region,), constants={0: 1})
    if alpha == 9.0:
        return Piece(region, (region,), {"beta": 1})
    if alpha == 10.0:
        return Piece(region, (region,), {"alpha": 1})
    if alpha == 11.0:
        return Piece(region, (region,), {"alpha": {}})
    if alpha == 12.0:
        return Piece(region, (region,), [("alpha", 1.0)])
    if alpha == 13.0:
        return Piece(region, (region,), op="Eluu")
    if alpha == 15.0:
        return Piece(region, (region,), {"alpha": 15.0, "beta": 1})
    if alpha == 16.0:
        start, stop = region[-1]
        return Piece(region, (region[:-1] + ((0, stop - start),),))
    return Piece(region, (region,), table_rows=(0, 1))

def make(number):
    return helper({})

@hookimpl
def dicompiler_strategies():
    return [Decides]

@hookimpl
def dicompiler_targets():
    return [Emits]

@hookimpl
def dicompiler_cost_models():
    return [Costs]

@hookimpl
def dicompiler_passes():
    return [Changes]

@hookimpl
def dicompiler_operators():
    return [OperatorRule("QuickGelu", rule, domain="com.microsoft", is_elementwise=True)]

@hookimpl
def dicompiler_platforms():
    return [PlatformFamily("badxN", "none", make)]
"""
PLACE = "(in helper, acme_bad.py:"
OF = "of acme-bad 1.2 (plugin 'bad')"
STRATEGY = f"strategy 'bad-strategy' {OF}"
REFUSED = f"{STRATEGY} made an infeasible plan"
PLUGIN = "plugin 'bad' of acme-bad 1.2"
RULE = f"rule 'com.microsoft::QuickGelu' of {PLUGIN}, for node 'g'"


def install(site: Path, source: str) -> None:
    info = site / "acme_bad-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-bad\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[dicompiler]\nbad = acme_bad\n")
    (site / "acme_bad.py").write_text(textwrap.dedent(source))


@pytest.fixture
def fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Return a function that runs a command with a plugin of this source and returns its error line.

    The command must end with exit code 1 and write no files.
    """
    log = logging.getLogger("dicompiler")
    state = log.handlers, log.propagate
    load_installed.cache_clear()
    monkeypatch.delitem(sys.modules, "acme_bad", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)

    def run(source: str, line: str, lines: int = 1) -> str:
        install(tmp_path / "site", source)
        onnx.save(networks.build("lenet"), "lenet.onnx")
        before = {path.name for path in tmp_path.iterdir()}
        assert main(line.split()) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        *warnings, error = captured.err.splitlines()
        assert len(warnings) == lines - 1
        assert {path.name for path in tmp_path.iterdir()} == before
        assert error.startswith("dicompiler: error: ")
        return error.removeprefix("dicompiler: error: ")

    yield run
    log.handlers, log.propagate = state
    load_installed.cache_clear()
    sys.modules.pop("acme_bad", None)


WITH = "compile lenet.onnx --platform rpi4x2 -o out"


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", f"{STRATEGY}: KeyError: 'pi99' {PLACE}"),
        ("init", f"{PLUGIN}: KeyError: 'pi99' {PLACE}"),
        ("exit", f"{STRATEGY}: SystemExit: 3 (in Decides.plan.<locals>.<lambda>, acme_bad.py:"),
        ("file", f"{STRATEGY}: FileNotFoundError: [Errno 2] No such file"),
        ("forgets", f"{STRATEGY}: ValueError: plan: layers.pool1: missing: give every layer at least one part"),
        ("none", f"{STRATEGY}: plan() returned NoneType instead of a Plan"),
        ("garbage", f"{STRATEGY}: plan() returned a Plan with ('pi01',) for layer 'conv1': expected a tuple of Part"),
        ("unknown", f"{REFUSED}: rpi4x2: unknown device 'pi07'"),
        ("outside", f"{REFUSED}: plan: layers.conv1[0].region: "),
        ("says", "bad-strategy: no plan: take another"),
    ],
)  # fmt: skip
def test_error_names_the_strategy(how: str, cause: str, fails: Callable[..., str]) -> None:
    assert fails(SOURCE, f"{WITH} --strategy bad-strategy{{how={how}}}").startswith(cause)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", f"KeyError: 'pi99' {PLACE}"),
        ("nothing", "emit() wrote no artifact.json"),
        ("foreign", "artifact.json: target is 'sockets': expected 'bad-target'"),
        ("memory", "memory_overhead() has no entry for device 'pi01'"),
        ("negative", "memory_overhead() returns -1 for device 'pi01': expected an integer of at least 0"),
        ("list", "memory_overhead() returned list instead of the bytes by device name"),
        ("footprints", "device_footprints() did not return a tuple of DeviceFootprint"),
        ("fast", "runtime_costs returned str instead of a RuntimeCosts"),
    ],
)
def test_error_names_the_target(how: str, cause: str, fails: Callable[..., str]) -> None:
    error = fails(SOURCE, f"{WITH} --strategy single --target bad-target{{how={how}}}")
    assert error.startswith(f"target 'bad-target' {OF}: {cause}")


@pytest.mark.parametrize("command", ["run", "verify"])
def test_error_during_a_run_names_the_target(
    command: str, fails: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "site", SOURCE)
    onnx.save(networks.build("lenet"), "lenet.onnx")
    assert main(f"{WITH} --strategy single --target bad-target{{how=runs}}".split()) == 0
    capsys.readouterr()
    # Remove the installed plugin, because `fails` installs it again.
    (tmp_path / "site").rename(tmp_path / "installed")
    assert fails(SOURCE, f"{command} out").startswith(f"target 'bad-target' {OF}: KeyError: 'pi99' {PLACE}")


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", f"cost model 'bad-cost' {OF}: KeyError: 'pi99' {PLACE}"),
        (
            "negative",
            f"cost model 'bad-cost' {OF}: layer 'conv1' on pi01 takes -1.0 s: give a finite number of at least 0",
        ),
        ("nan", f"cost model 'bad-cost' {OF}: layer 'conv1' on pi01 takes nan s: "),
        ("none", f"cost model 'bad-cost' {OF}: layer 'conv1' on pi01 takes None s: "),
        ("runtime", f"cost model 'bad-cost' {OF}: runtime_costs() returned NoneType instead of a RuntimeCosts"),
    ],
)
@pytest.mark.parametrize("strategy", ["modnn", "stahl"])
def test_error_names_the_cost_model(how: str, cause: str, strategy: str, fails: Callable[..., str]) -> None:
    error = fails(SOURCE, f"{WITH} --strategy {strategy} --cost bad-cost{{how={how}}}")
    assert error.startswith(cause)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", f"pass 'bad-pass' {OF}: KeyError: 'pi99' {PLACE}"),
        ("illegal", f"after pass 'bad-pass' {OF}: "),
        ("text", f"pass 'bad-pass' {OF}: run() set plan to str instead of a Plan"),
        ("in_place", f"pass 'bad-pass' {OF}: run() changed the model of the state that it got: change a copy"),
    ],
)
def test_error_names_the_pass(how: str, cause: str, fails: Callable[..., str]) -> None:
    assert fails(SOURCE, f"opt lenet.onnx -p bad-pass{{how={how}}} -o out.onnx").startswith(cause)


@pytest.mark.parametrize(
    ("alpha", "cause"),
    [
        (1.0, f"rule 'com.microsoft::QuickGelu' of {PLUGIN}: KeyError: 'pi99' {PLACE}"),
        (2.0, f"{RULE}: out is ((0, 1), (0, 1)): "),
        (3.0, f"{RULE}: needs[0] is ((0, 1), (0, 99)"),
        (4.0, f"{RULE}: needs has 0 entries"),
        (5.0, f"{RULE}: needs[0] is ((0, 1), (3, 3)), which is empty: give None or a region that is not empty"),
        (6.0, f"{RULE}: needs[0] is [(0, 1), (0, 1)]: expected a tuple with a pair of integers (start, stop) for each"),
        (7.0, f"{RULE}: out is ((0.0, 1.0), (0.0, 1.0)): expected a tuple with a pair of integers"),
        (8.0, f"{RULE}: constants[0] is 1: expected an array for the index of an input"),
        (15.0, f"{RULE}: its parts cannot be computed: "),
        (16.0, f"{RULE}: the parts compute other values than the whole node: differs by "),
    ],
)  # fmt: skip
def test_error_names_the_rule(alpha: float, cause: str, fails: Callable[..., str]) -> None:
    text = f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g (float[1, 8] x) => (float[1, 8] y)
        {{ [g] y = com.microsoft.QuickGelu <alpha = {alpha}> (x) }}"""
    onnx.save(onnx.parser.parse_model(text), "gelu.onnx")
    assert fails(SOURCE, "compile gelu.onnx --platform rpi4x2 --strategy modnn -o out").startswith(cause)


@pytest.mark.parametrize(
    ("alpha", "cause"),
    [
        (9.0, "attributes is {'beta': 1}: Unrecognized attribute: beta for operator Elu"),
        (10.0, "attributes is {'alpha': 1}: Mismatched attribute type in 'g : alpha'"),
        (11.0, "attributes is {'alpha': {}}: "),
        (12.0, "attributes is [('alpha', 1.0)]: expected values by attribute name"),
        (13.0, "op is 'Eluu' and attributes is {}: No Op registered for Eluu with domain_version of 17"),
        (14.0, "table_rows is (0, 1): the node must read regions of two inputs, which are a table and its indices"),
    ],
)
@pytest.mark.parametrize(
    "command", ["compile elu.onnx --platform rpi4x2 --strategy modnn -o out", "opt elu.onnx -p {} -o out.onnx"]
)
def test_error_names_the_rule_of_an_operator_or_attribute_that_onnx_does_not_know(
    command: str, alpha: float, cause: str, fails: Callable[..., str]
) -> None:
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[1, 8] x) => (float[1, 8] y)
        {{ [g] y = Elu <alpha = {alpha}> (x) }}"""
    onnx.save(onnx.parser.parse_model(text), "elu.onnx")
    source = SOURCE.replace('"QuickGelu", rule, domain="com.microsoft"', '"Elu", rule, replaces=True')
    pipeline = "infer-shapes,form-layers,lop{devices=a,b},partition"
    assert fails(source, command.format(pipeline)).startswith(f"rule 'Elu' of {PLUGIN}, for node 'g': {cause}")


def test_error_names_the_platform(fails: Callable[..., str]) -> None:
    error = fails(SOURCE, "compile lenet.onnx --platform badx2 --strategy single -o out")
    assert error.startswith(f"platform 'badxN' of {PLUGIN}: KeyError: 'pi99' {PLACE}")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (
            "import no_such_module",
            " is left out: ModuleNotFoundError: No module named 'no_such_module' (acme_bad.py:1)",
        ),
        (
            "dicompiler_api = 3",
            " is left out: it is written for version 3 of the hooks, newer than 2: install a newer dicompiler",
        ),
        (
            SOURCE + "\n@hookimpl\ndef dicompiler_passes():\n    raise ValueError('late')",
            ": dicompiler_passes fails: ValueError: late (in dicompiler_passes, acme_bad.py:169)",
        ),
        (
            SOURCE.replace('name = "bad-pass"', 'name = "bad-pass"\n    requires = ("layer",)'),
            ": pass Changes is left out: TypeError: Changes names 'layer', which is not a field of PipelineState "
            "(did you mean 'layers'?)",
        ),
    ],
)
def test_unknown_name_reports_plugins_that_were_left_out(source: str, cause: str, fails: Callable[..., str]) -> None:
    error = fails(source, f"{WITH} --strategy acme-best", lines=2)
    assert error == f"unknown strategy 'acme-best'; {PLUGIN}{cause}"


def test_compare_continues_with_other_strategies(
    tmp_path: Path, fails: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails is not None
    install(tmp_path / "site", SOURCE)
    onnx.save(networks.build("lenet"), "lenet.onnx")
    strategies = "bad-strategy,single,bad-strategy{how=none}"
    assert main(["compare", "lenet.onnx", "--platform", "rpi4x2", "--strategies", strategies]) == 0
    captured = capsys.readouterr()
    assert "single" in captured.out
    assert f"{STRATEGY}: KeyError: 'pi99'" in " ".join(captured.out.split())


@pytest.mark.parametrize("what", ["explore --strategy bad-strategy", "plan --strategy bad-strategy"])
def test_other_commands_name_the_plugin(what: str, fails: Callable[..., str]) -> None:
    command, rest = what.split(" ", 1)
    error = fails(SOURCE, f"{command} lenet.onnx --platform rpi4x2 {rest} -o out")
    assert error.startswith(f"{STRATEGY}: KeyError: 'pi99' {PLACE}")


def test_debug_prints_the_traceback(
    tmp_path: Path, fails: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails is not None
    install(tmp_path / "site", SOURCE)
    onnx.save(networks.build("lenet"), "lenet.onnx")
    assert main([*WITH.split(), "--strategy", "bad-strategy", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


RAISES = """
from dataclasses import dataclass
from dicompiler.plugin_api import hookimpl, Part, Strategy

class Odd(BaseException):
    pass

{at_import}

@dataclass(frozen=True)
class Whole(Strategy):
    name = "acme-whole"

    def plan(self, problem):
        {plan}
        return problem.build_plan({{layer.name: (Part("pi01"),) for layer in problem.layers.layers}})

@hookimpl
def dicompiler_strategies():
    {hook}
    yield Whole
"""


@pytest.mark.parametrize("raised", ["SystemExit(0)", "GeneratorExit()", "Odd('x')", "EOFError()"])
@pytest.mark.parametrize("place", ["at_import", "hook", "plan"])
def test_any_exception_is_one_line_that_names_the_plugin(place: str, raised: str, fails: Callable[..., str]) -> None:
    source = RAISES.format(**{**dict.fromkeys(("at_import", "hook", "plan"), "pass"), place: f"raise {raised}"})
    name = raised.partition("(")[0]
    error = fails(source, f"{WITH} --strategy acme-whole", lines=1 if place == "plan" else 2)
    if place == "plan":
        assert error.startswith(f"strategy 'acme-whole' {OF}: {name}") and "(in Whole.plan, acme_bad.py:" in error
    else:
        failed = {"at_import": " is left out", "hook": ": dicompiler_strategies fails"}[place]
        assert error.startswith(f"unknown strategy 'acme-whole'; {PLUGIN}{failed}: {name}") and "acme_bad.py:" in error


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (f"{WITH} --strategy singel", "unknown strategy 'singel' (did you mean 'single'?); "),
        (f"{WITH} --strategy acme-whole", "unknown strategy 'acme-whole'; "),
        (f"{WITH} --target acme-target", "unknown target 'acme-target'; "),
        ("compile lenet.onnx --platform acme-board4 -o out", "unknown platform 'acme-board4': give "),
    ],
)
def test_unknown_name_is_reported_with_the_plugins_that_failed_to_load(
    options: str, start: str, fails: Callable[..., str]
) -> None:
    error = fails("import no_such_module", options, lines=2)
    assert error.startswith(start), error
    assert f"; {PLUGIN} is left out: ModuleNotFoundError: No module named 'no_such_module' (acme_bad.py:" in error
