"""Whether a split network computes what onnxruntime computes: outputs compared by type, transfers by their bytes.

In: outputs of the whole model and of the split one, or a model and how to split it. Out: Checks, each with numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.base.errors import one_line
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.program import Program, TensorSpec, Transfer
from dicompiler.ir.regions import to_slices
from dicompiler.verify.exact import CheckModel, NotExactError, ReadMasks, Relaxation, build_check_model, seeds_needed
from dicompiler.verify.exact.graph_facts import Rules
from dicompiler.verify.executor import Execution, ProgramExecutor, run_model
from dicompiler.verify.tolerances import RELATIVE_TOLERANCES, Tolerance


@dataclass(frozen=True)
class Check:
    """One thing that was verified: its name, whether it held, and what was found beside what is allowed.

    applies: False where it cannot be verified of this network; it counts as passed, and `detail` says why.
    """

    name: str
    passed: bool
    detail: str
    applies: bool = True


@dataclass(frozen=True)
class Verification:
    """All checks of one artifact."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def compare_value(
    name: str,
    reference: Any,
    actual: Any,
    exact: bool = False,
    tolerance: Tolerance | None = None,
    extra_tolerance: float = 0.0,
) -> Check:
    """Whether `got` is `reference`: same type and shape, NaN in the same places, values within what is allowed. By
    default that is the type's tolerance (bit-equal for integers and bool, and for all types where `exact`). more: what
    is allowed beside that, as a share of max|reference|."""
    if not isinstance(reference, np.ndarray) or not isinstance(actual, np.ndarray):
        return _compare_nested(name, reference, actual, exact, tolerance, extra_tolerance)
    if reference.dtype != actual.dtype or reference.shape != actual.shape:
        detail = f"{actual.dtype} {actual.shape} where onnxruntime gives {reference.dtype} {reference.shape}"
        return Check(name, False, detail)
    floating = str(reference.dtype) in RELATIVE_TOLERANCES
    tolerance = tolerance or (Tolerance(RELATIVE_TOLERANCES[str(reference.dtype)]) if floating else None)
    if tolerance is None or exact:
        differ = int(np.sum(~_equal_or_nan(reference, actual))) if floating else int(np.sum(reference != actual))
        return Check(name, differ == 0, "bit-equal" if differ == 0 else f"{differ} of {reference.size} elements differ")
    if extra_tolerance and tolerance.step is None:
        tolerance = Tolerance(tolerance.limit + extra_tolerance)
    return _compare_values(name, reference, actual, tolerance)


def compare_type_only(name: str, reference: Any, actual: Any, random_node: onnx.NodeProto) -> Check:
    """As `compare`, of what depends on random numbers that `cause` draws: only its type and rank are the same each
    time."""
    if isinstance(reference, np.ndarray) and isinstance(actual, np.ndarray):
        if reference.dtype != actual.dtype or reference.ndim != actual.ndim:
            return compare_value(name, reference, actual)
    elif type(reference) is not type(actual):
        return compare_value(name, reference, actual)
    detail = f"{random_node.op_type} {random_node.name!r} draws random numbers before it, others in each run: its type alone is compared"
    return Check(name, True, detail, applies=False)


def _compare_nested(name: str, reference: Any, got: Any, exact: bool, allowed: Tolerance | None, more: float) -> Check:
    """As `compare`, of what is no tensor: lists and maps entry by entry, numbers as tensors; all else must be equal."""
    if isinstance(reference, list) and isinstance(got, list):
        pairs = dict(enumerate(zip(reference, got, strict=False)))
        alike = len(reference) == len(got)
    elif isinstance(reference, dict) and isinstance(got, dict):
        pairs = {key: (reference[key], got[key]) for key in reference if key in got}
        alike = list(reference) == list(got)
    elif isinstance(reference, float) and isinstance(got, float):
        return compare_value(name, np.asarray(reference, np.float32), np.asarray(got, np.float32), exact, allowed, more)
    else:
        same = bool(repr(reference) == repr(got))
        return Check(name, same, "equal" if same else f"{one_line(repr(got))} where onnxruntime gives {reference!r}")
    if not alike:
        return Check(name, False, f"{len(got)} entries where onnxruntime gives {len(reference)}, or of other names")
    checks = [(key, compare_value(name, *pair, exact, allowed, more)) for key, pair in pairs.items()]
    wrong = next((f"[{key!r}]: {check.detail}" for key, check in checks if not check.passed), "")
    return Check(name, not wrong, wrong or f"{len(checks)} entries, each as onnxruntime gives it")


def _equal_or_nan(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)))


def _compare_values(name: str, reference: NDArray[Any], got: NDArray[Any], tolerance: Tolerance) -> Check:
    wide, other = reference.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(wide)
    if not np.array_equal(finite, np.isfinite(other)) or not np.all(_equal_or_nan(wide[~finite], other[~finite])):
        return Check(name, False, "NaN or infinity in other places than onnxruntime puts them")
    difference = float(np.max(np.abs(wide[finite] - other[finite]), initial=0.0))
    if tolerance.step is not None:
        steps = round(difference / tolerance.step, 3)  # a dequantised number is rounded itself
        detail = f"differs by {steps:g} steps of {tolerance.step:.3g} (allowed: {tolerance.limit:g})"
        return Check(name, steps <= tolerance.limit, detail)
    largest = float(np.max(np.abs(wide[finite]), initial=0.0))
    share = difference / largest if largest else difference
    detail = f"differs by {share:.1e} of max|reference| (allowed: {tolerance.limit:.0e})"
    return Check(name, share <= tolerance.limit, detail)


def check_exact(
    model: Model,
    split: Callable[[Model], Program],
    seeds: Sequence[int] | None = None,
    rules: Rules | None = None,
    layers: LayerGraph | None = None,
) -> Check:
    """Proves the geometry: integer-valued check models of the same graph, split the same way, are bit-equal.

    `split` compiles a model by the plan in question. By default as many seeds as it takes to read every tap and every
    input channel of every convolution. A layer is left out, and named, where an operator rounds for which nothing
    exact can stand; all of it does not apply where onnxruntime refuses the check model. Every role of a plan with
    replicas or losses is checked. rules: as `check_model` takes them. layers: those of `model`, which the result
    counts; in those that stay whole more is exact.
    """
    chosen = range(seeds_needed(model)) if seeds is None else seeds
    read, each, treatment = ReadMasks(), "", Relaxation()
    for seed in chosen:
        try:  # one check model is held at a time, as it is as large as the network
            treatment, read, roles, failed = _check_seed(
                build_check_model(model, seed, rules, treatment, layers), split, read
            )
        except NotExactError as error:
            return Check("exact", True, str(error).removeprefix("exact check: "), applies=False)
        if len(roles) > 1:
            each = f", each in {len(roles)} {'roles' if roles[-1] else 'replicas'}"
        if failed:
            lost = roles[failed[0]]
            name = f"without {', '.join(lost)}" if lost else f"replica {failed[0]}"
            return Check("exact", False, f"seed {seed}: {f'{name}: ' if each else ''}{failed[1]}")
    models = f"bit-equal for {len(chosen)} check models ({read.coverage}){each}"
    return Check("exact", True, models + _layer_summary(treatment.excluded, layers))


def _check_seed(
    checked: CheckModel, split: Callable[[Model], Program], read: ReadMasks
) -> tuple[Relaxation, ReadMasks, list[Sequence[str]], tuple[int, str] | None]:
    """Of a check model: its treatment; what is read with it and before; without whom each role is; which role differs
    first, and how."""
    reference = run_model(checked.model, checked.inputs, is_single_use=True)
    roles = split(checked.model).roles
    results = (
        _first_difference(reference, ProgramExecutor(role, is_single_use=True).run(checked.inputs)) for role in roles
    )
    failed = next(((number, why) for number, why in enumerate(results) if why), None)
    return checked.relaxation, read.including(checked.model), [role.failed for role in roles], failed


def _layer_summary(left: Mapping[str, str], layers: LayerGraph | None) -> str:
    """How many layers were checked, and why each other one was not. left: name of a node → why."""
    reasons = "".join(f"; left out: {why}" for why in left.values())
    if layers is None:
        return reasons
    without = sum(any(node.name in left for node in layer.nodes) for layer in layers.layers)
    return f", {len(layers.layers) - without} of {len(layers.layers)} layers{reasons}"


def _first_difference(reference: Mapping[str, Any], execution: Execution) -> str:
    """The first output that is not bit-equal, in words; '' where there is none."""
    for device, outputs in execution.delivered.items():
        for name, value in outputs.items():
            check = compare_value(name, reference[name], value, exact=True)
            if not check.passed:
                return f"output {name!r} on {device}: {check.detail}"
    for state, value in execution.kept_states:
        check = compare_value(state.present, reference[state.present][to_slices(state.region)], value, exact=True)
        if not check.passed:
            return f"state {state.past!r}, kept as {state.written_name!r}: {check.detail}"
    return ""


def check_transfers(
    predicted: Sequence[Transfer], sent: Mapping[int, int], frames: int, roles: int = 1, role_noun: str = "replicas"
) -> Check:
    """Whether every transfer carried just the bytes that were predicted.

    predicted: `Program.all_transfers`. sent: bytes by their index. frames: how many each role played.
    what: what roles are called.
    """
    for transfer in predicted:
        expected, got = transfer.value.nbytes * frames, sent.get(transfer.index, 0)
        if expected != got:
            detail = (
                f"{transfer.value.name!r} {transfer.sender}→{transfer.receiver}: {got} bytes sent, {expected} predicted"
            )
            return Check("bytes", False, detail)
    total = sum(transfer.value.nbytes for transfer in predicted)
    each = "a frame" if roles == 1 else f"in a frame of each of {roles} {role_noun}"
    return Check("bytes", True, f"{len(predicted)} transfers, {total} bytes {each}: as predicted")


def graph_inputs(model: Model) -> tuple[TensorSpec, ...]:
    """The graph's inputs that are no initializers."""
    tensors = model.tensors()
    known = [tensors[value.name] for value in model.proto.graph.input]
    return tuple(TensorSpec(t.name, t.dtype, t.shape) for t in known if not t.is_constant)


def random_inputs(values: Sequence[TensorSpec], seed: int = 0) -> dict[str, NDArray[Any]]:
    """Seeded inputs for graph inputs of static shape: normal for floats, 0 or 1 for bool, 0 to 7 for integers."""
    rng = np.random.default_rng(seed)
    inputs: dict[str, NDArray[Any]] = {}
    for value in values:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.dtype))
        shape = value.shape or ()
        if str(dtype) in RELATIVE_TOLERANCES:
            inputs[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            inputs[value.name] = rng.integers(0, 2 if dtype == np.bool_ else 8, shape).astype(dtype)
    return inputs
