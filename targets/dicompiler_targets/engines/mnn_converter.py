"""Conversion of an ONNX submodel to the two files of an MNN network: operators (.mnn) and weights (.mnn.weight).

MNN's own converter writes the files. `mnn_operators` first refuses nodes that MNN does not compute as onnxruntime, and
adds attributes with defaults that MNN's converter does not know:

    BatchNormalization  ⇒  BatchNormalization <epsilon = 1e-5>

The converter runs in another process (`mnn_worker`), because it prints to stdout and may crash. The process also runs
the converted network once, because some networks crash only then.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import onnx
from onnx import helper

from dicompiler.plugin_api import DicompilerError, Model
from dicompiler.plugin_api.artifacts import EngineFiles, UnsupportedByEngine
from dicompiler.plugin_api.onnx import Weight
from dicompiler.plugin_api.utilities import one_line
from dicompiler_targets.engines.mnn_operators import SubmodelFacts, explicit_attributes, find_unsupported_nodes

UUID_PATTERN = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
NIL_UUID = b"00000000-0000-0000-0000-000000000000"
"""Identifier that replaces the random one of MNN's converter, so that equal submodels give equal bytes."""


def convert_to_mnn(model: onnx.ModelProto, weights: Mapping[str, Weight]) -> EngineFiles:
    """Convert an ONNX submodel of float tensors to the two files of an MNN network.

    The inputs of the network are named in0, in1, …, and its outputs out0, out1, ….

    Args:
        model: The submodel.
        weights: The data of initializers that are placeholders, by name.

    Returns:
        The files.

    Raises:
        UnsupportedByEngine: MNN does not compute a node, a type or a shape of the submodel as onnxruntime does, or it
            is not installed on this host.
    """
    if find_spec("MNN") is None:
        raise UnsupportedByEngine("a missing package: run 'pip install MNN'")
    facts = SubmodelFacts(model, weights)
    facts.check_interface()
    if reasons := find_unsupported_nodes(facts):
        raise UnsupportedByEngine(reasons[min(reasons)])
    shapes = [[facts.shapes[value.name] for value in values] for values in (model.graph.input, model.graph.output)]
    try:
        content = _make_plain_model(facts).to_bytes()
    except DicompilerError as error:
        raise UnsupportedByEngine(str(error)) from error
    runtime = resources.files("dicompiler_targets.sockets.runtime").joinpath("engine_mnn.py")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "model.onnx").write_bytes(content)
        (directory / "shapes.json").write_text(json.dumps(shapes), encoding="utf-8")
        (directory / "engine_mnn.py").write_bytes(runtime.read_bytes())
        _converter_process.convert(directory)
        network, weight_file = (directory / "model.mnn").read_bytes(), directory / "model.mnn.weight"
        return EngineFiles(
            UUID_PATTERN.sub(NIL_UUID, network, count=1), weight_file.read_bytes() if weight_file.exists() else b""
        )


class _ConverterProcess:
    """The process of the script `mnn_worker`, which converts models one after another.

    It is started for the first model, and again if it has ended. It ends with this process, when its stdin is closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def convert(self, directory: Path) -> None:
        """Convert the model in a directory; raise UnsupportedByEngine if this fails or crashes."""
        with self._lock:
            code = self._request(directory)
        if code != "0":
            log = directory / "log"
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
            cause = lines[-1] if code == "1" and lines else f"exit code {code}"
            raise UnsupportedByEngine(f"an error of MNN ({one_line(cause)})")

    def _request(self, directory: Path) -> str:
        """Return the exit code of the fork that converts the model, or a text if the process has ended."""
        process = self._get_process()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{directory}\n")
            process.stdin.flush()
        except BrokenPipeError:
            return "unknown: its converter cannot be started"
        return process.stdout.readline().strip() or "unknown: its converter ended"

    def _get_process(self) -> subprocess.Popen[str]:
        # A fork of this process must not use the pipes of its parent.
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            source = resources.files(__package__).joinpath("mnn_worker.py").read_text(encoding="utf-8")
            self._process = subprocess.Popen(
                [sys.executable, "-c", source],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # Threads do not survive a fork.
            )
            self._owner = os.getpid()
            atexit.register(self._stop)
        return self._process

    def _stop(self) -> None:
        """Let the process end, and wait for it."""
        if self._process is not None and self._owner == os.getpid():
            self._process.communicate()


_converter_process = _ConverterProcess()


def _make_plain_model(facts: SubmodelFacts) -> Model:
    """Return the submodel with explicit attributes and short names, so that the converted bytes depend on no name."""
    graph = facts.model.graph
    names = {"": ""} | {value.name: f"in{i}" for i, value in enumerate(graph.input)}
    names |= {value.name: f"out{i}" for i, value in enumerate(graph.output)}
    for name in _list_names(graph):
        names.setdefault(name, f"t{len(names)}")
    nodes = [_make_plain_node(facts, node, names) for node in graph.node]
    inputs, outputs = (
        [onnx.ValueInfoProto(name=names[value.name], type=value.type) for value in values]
        for values in (graph.input, graph.output)
    )
    renamed = onnx.ModelProto(
        ir_version=facts.model.ir_version,
        opset_import=facts.model.opset_import,
        graph=helper.make_graph(nodes, "submodel", inputs, outputs),
    )
    for tensor in graph.initializer:
        added = renamed.graph.initializer.add()
        added.CopyFrom(tensor)
        added.name = names[tensor.name]
    return Model(renamed, {names[name]: weight for name, weight in facts.weights.items() if name in names})


def _make_plain_node(facts: SubmodelFacts, node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    inputs, outputs = ([names[name] for name in values] for values in (node.input, node.output))
    if node.op_type == "Dropout":
        return helper.make_node("Identity", inputs[:1], outputs[:1])
    return helper.make_node(node.op_type, inputs, outputs, domain=node.domain, **explicit_attributes(facts, node))


def _list_names(graph: onnx.GraphProto) -> Iterator[str]:
    for tensor in graph.initializer:
        yield tensor.name
    for node in graph.node:
        yield from node.input
        yield from node.output
