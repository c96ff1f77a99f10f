"""Plugins written for module names of before the door: what to import instead, as the end of an error.

ImportError → "; plugins import from one door now: from dicompiler.plugin_api import Plan, load_plan"
"""

from __future__ import annotations

import ast
import linecache
import traceback

OLD = """
artifact: ARTIFACT Json TYPES artifact_document json_text transfer_document value_document
client: Session
compilation: Compilation
costs: Analytic CostModel Count Share count flops macs task_macs weight_regions
errors: DicompilerError PluginError RunError UsageError nearest
executor: Executor run_model
fronts: AUTODICE Front Measurement Point Tell check_objectives values=objective_values
hookspecs: API_VERSION hookimpl
hosts: Hosts Place
importing: unique
layers: Layer LayerGraph
limits: check=check_constraints check_occupied fits=fits_constraints lacking=memory_lacking needs=memory_needed
  room=free_memory used=memory_used
lowering: split
memory: constant_sizes peak program_memory segment_values
metrics: DeviceMetrics Metrics
model: Model
modelfile: without
objectives: OBJECTIVES terms=objective_terms
operators.rule: Node Operation OperatorRule Piece PieceFunction STAND_IN_DOMAIN Tensor whole
passes: Instrument Pass PassFailure PassManager pipeline
plan: Part Plan load=load_plan
platform: Device Host Link Network Platform PlatformFamily PlatformFormat
plugins: registry
problem: INTERRUPTED Problem Strategy
program: DeviceProgram Program Segment Step Transfer Value
referee: Referee=RemoteEvaluator
regions: Interval Region Shape bounding contains full intersect is_empty replace=with_interval shape_of shares shift
  slices volume
routing: Box Routing leaves route_on
schema: load_json validate
specs: Spec
structure: captures
target: DeviceReport Installed Occupied Optimization RunOptions RunResult Target Timed
tasks: Key Task TaskId Work align cuttable make_task=share_task output_shape reduction
tiling: Label axes=named_axes axis_of cut_axis exit_of fused=fused_regions grid=grid_tiles read_within
  settled=aligned_cuts tile whole_plan
units: format_bytes
verify: Check Tolerance compare graph_inputs random_inputs
weights: LARGE Weight array_dtype dense dtype_name hollow is_hollow raw_nbytes
"""
"""Module → what it had that `dicompiler.plugin_api` has now; `old=new` where that has another name."""


def renamed() -> dict[str, dict[str, str]]:
    """Old module → old name → the door's name."""
    table: dict[str, dict[str, str]] = {}
    module = ""
    for word in OLD.split():
        if word.endswith(":"):
            module = f"dicompiler.{word[:-1]}"
        else:
            old, _, new = word.partition("=")
            table.setdefault(module, {})[old] = new or old
    return table


def remedy(error: BaseException) -> str:
    """What to import instead where a plugin's import of a module of dicompiler failed; '' for any other error."""
    if not isinstance(error, ImportError) or not (error.name or "").startswith("dicompiler"):
        return ""
    table = renamed()
    names = [table.get(module, {}).get(name, "") for module, name in _wanted(error)]
    if names and all(names):
        return f"; plugins import from one door now: from dicompiler.plugin_api import {', '.join(names)}"
    return "; plugins import from dicompiler.plugin_api alone now: take from it what has the same purpose"


def _wanted(error: ImportError) -> list[tuple[str, str]]:
    """(module, name) of all that the failed statement imports, as its source says."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        source = linecache.getline(frame.filename, frame.lineno or 0).strip()
        for following in range(1, 40):  # a statement in parentheses goes on
            try:
                (statement,) = ast.parse(source).body
            except (SyntaxError, ValueError):
                source += "\n" + linecache.getline(frame.filename, (frame.lineno or 0) + following)
                continue
            if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                return [(statement.module, alias.name) for alias in statement.names]
            break
    return []
