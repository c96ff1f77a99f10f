"""Comparison of a split network with onnxruntime: outputs within tolerances, and sent bytes as predicted."""

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
    """The result of one check.

    Attributes:
        name: Name of the check ("exact", "bytes", …) or of the compared output.
        passed: True if the check succeeded or does not apply.
        detail: The difference found and the difference allowed, or the reason why the check does not apply.
        applies: False if the check proves nothing, for example because of the network or its inputs.
    """

    name: str
    passed: bool
    detail: str
    applies: bool = True


@dataclass(frozen=True)
class Verification:
    """Result of the verification of one artifact.

    Attributes:
        checks: All checks, in the order in which they ran.
    """

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True if all checks passed."""
        return all(check.passed for check in self.checks)


def compare_value(
    name: str,
    reference: Any,
    actual: Any,
    exact: bool = False,
    tolerance: Tolerance | None = None,
    extra_tolerance: float = 0.0,
) -> Check:
    """Compare a value with its reference.

    Types, shapes, and the positions of NaN and infinity must be equal. Finite values must be within the tolerance.
    Lists and maps are compared entry by entry.

    Args:
        name: Name of the value, which becomes the name of the check.
        reference: The value that onnxruntime computed.
        actual: The value to check.
        exact: True to require bit-equal values. Integers and bools must always be bit-equal.
        tolerance: The allowed difference. By default it depends on the type of the reference.
        extra_tolerance: Share of max|reference| that is added to the allowed difference, for example for tensors that
            are sent in narrower types. It is ignored if the tolerance is in quantization steps.

    Returns:
        The check, with the largest difference in its detail.
    """
    if not isinstance(reference, np.ndarray) or not isinstance(actual, np.ndarray):
        return _compare_nested(name, reference, actual, exact, tolerance, extra_tolerance)
    if reference.dtype != actual.dtype or reference.shape != actual.shape:
        detail = f"{actual.dtype} {actual.shape}, but onnxruntime computes {reference.dtype} {reference.shape}"
        return Check(name, False, detail)
    is_float = str(reference.dtype) in RELATIVE_TOLERANCES
    tolerance = tolerance or (Tolerance(RELATIVE_TOLERANCES[str(reference.dtype)]) if is_float else None)
    if is_float and reference.size and not np.isfinite(reference).any() and _equal_or_nan(reference, actual).all():
        detail = "onnxruntime computes no finite value, so that equal outputs prove nothing: give other inputs"
        return Check(name, True, detail, applies=False)
    if tolerance is None or exact:
        count = int(np.sum(~_equal_or_nan(reference, actual))) if is_float else int(np.sum(reference != actual))
        return Check(name, count == 0, "bit-equal" if count == 0 else f"{count} of {reference.size} elements differ")
    if extra_tolerance and tolerance.step is None:
        tolerance = Tolerance(tolerance.limit + extra_tolerance)
    return _compare_values(name, reference, actual, tolerance)


def compare_type_only(name: str, reference: Any, actual: Any, random_node: onnx.NodeProto) -> Check:
    """Compare only the type and rank of a value, because the random numbers of `random_node` affect its elements."""
    if isinstance(reference, np.ndarray) and isinstance(actual, np.ndarray):
        if reference.dtype != actual.dtype or reference.ndim != actual.ndim:
            return compare_value(name, reference, actual)
    elif type(reference) is not type(actual):
        return compare_value(name, reference, actual)
    detail = (
        f"it depends on random numbers of {random_node.op_type} {random_node.name!r}, which differ in each run: "
        "only its type is compared"
    )
    return Check(name, True, detail, applies=False)


def _compare_nested(
    name: str, reference: Any, actual: Any, exact: bool, tolerance: Tolerance | None, extra_tolerance: float
) -> Check:
    """Compare lists and maps entry by entry, and numbers as arrays of rank 0. Other values must be equal."""
    if isinstance(reference, list) and isinstance(actual, list):
        pairs = dict(enumerate(zip(reference, actual, strict=False)))
        is_same_form = len(reference) == len(actual)
    elif isinstance(reference, dict) and isinstance(actual, dict):
        pairs = {key: (reference[key], actual[key]) for key in reference if key in actual}
        is_same_form = list(reference) == list(actual)
    elif isinstance(reference, float) and isinstance(actual, float):
        arrays = np.asarray(reference, np.float32), np.asarray(actual, np.float32)
        return compare_value(name, *arrays, exact, tolerance, extra_tolerance)
    else:
        is_equal = bool(repr(reference) == repr(actual))
        detail = "equal" if is_equal else f"{one_line(repr(actual))}, but onnxruntime computes {reference!r}"
        return Check(name, is_equal, detail)
    if not is_same_form:
        detail = f"{len(actual)} entries, but onnxruntime computes {len(reference)}, or their names differ"
        return Check(name, False, detail)
    checks = [(key, compare_value(name, *pair, exact, tolerance, extra_tolerance)) for key, pair in pairs.items()]
    wrong = next((f"[{key!r}]: {check.detail}" for key, check in checks if not check.passed), "")
    return Check(name, not wrong, wrong or f"{len(checks)} entries, equal to onnxruntime's")


def _equal_or_nan(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)))


def _compare_values(name: str, reference: NDArray[Any], actual: NDArray[Any], tolerance: Tolerance) -> Check:
    expected, computed = reference.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(computed)) or not np.all(
        _equal_or_nan(expected[~finite], computed[~finite])
    ):
        return Check(name, False, "NaN or infinity at other places than in onnxruntime's result")
    difference = float(np.max(np.abs(expected[finite] - computed[finite]), initial=0.0))
    if tolerance.step is not None:
        # Rounding during dequantization can make a difference of n steps slightly larger than n · step. The quotient is
        # rounded, so that it does not exceed a limit of n steps.
        steps = round(difference / tolerance.step, 3)
        detail = f"differs by {steps:g} steps of {tolerance.step:.3g} (allowed: {tolerance.limit:g})"
        return Check(name, steps <= tolerance.limit, detail)
    largest = float(np.max(np.abs(expected[finite]), initial=0.0))
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
    """Check with small integers instead of the real weights that a split reads and places all elements correctly.

    The split check model (the same graph with small integers) must give the same bits as the whole one. All replicas
    and failure plans are checked. Nodes that cannot compute exact integers are not checked; the detail names them.

    Args:
        model: The normalised network.
        split: Function that compiles a model by the plan to check.
        seeds: Seeds of the check models. Default: enough seeds to read every kernel position and input channel.
        rules: Operator rules by (domain, operator type). Default: the built-in ones.
        layers: The layers of `model`. With them, fewer nodes are left unchecked, and the detail counts the checked
            layers.
    """
    used_seeds = range(seeds_needed(model)) if seeds is None else seeds
    masks, role_note, relaxation = ReadMasks(), "", Relaxation()
    for seed in used_seeds:
        try:
            # The check model is not assigned to a variable, so that it is freed before the next one is built. It is as
            # large as the network.
            relaxation, masks, roles, failure = _check_seed(
                build_check_model(model, seed, rules, relaxation, layers), split, masks
            )
        except NotExactError as error:
            return Check("exact", True, str(error).removeprefix("exact check: "), applies=False)
        if len(roles) > 1:
            role_note = f", each in {len(roles)} {'roles' if roles[-1] else 'replicas'}"
        if failure:
            failed_devices = roles[failure[0]]
            name = f"without {', '.join(failed_devices)}" if failed_devices else f"replica {failure[0]}"
            return Check("exact", False, f"seed {seed}: {f'{name}: ' if role_note else ''}{failure[1]}")
    models = f"bit-equal for {len(used_seeds)} check models ({masks.coverage}){role_note}"
    return Check("exact", True, models + _layer_summary(relaxation.excluded, layers))


def _check_seed(
    check_model: CheckModel, split: Callable[[Model], Program], masks: ReadMasks
) -> tuple[Relaxation, ReadMasks, list[Sequence[str]], tuple[int, str] | None]:
    """Compare the results of one check model with those of its split version.

    A check model is the network's graph with small integers instead of the real weights. A role is the plan, a replica
    (copy on other devices) or a failure plan.

    Returns:
        - The changes to the network's graph that keep all numbers of the check model exact.
        - `masks`, joined with the weight positions that this check model reads.
        - For each role, the devices whose failure it is for; () for the plan and its replicas.
        - The index of the first role with wrong results and a description of the difference, or None.
    """
    reference = run_model(check_model.model, check_model.inputs, is_single_use=True)
    roles = split(check_model.model).roles
    results = (
        _first_difference(reference, ProgramExecutor(role, is_single_use=True).run(check_model.inputs))
        for role in roles
    )
    first_failure = next(((number, difference) for number, difference in enumerate(results) if difference), None)
    return check_model.relaxation, masks.including(check_model.model), [role.failed for role in roles], first_failure


def _layer_summary(excluded: Mapping[str, str], layers: LayerGraph | None) -> str:
    """Describe how many layers were checked, and why the nodes in `excluded` (node name to reason) were not."""
    reasons = "".join(f"; left out: {reason}" for reason in excluded.values())
    if layers is None:
        return reasons
    excluded_count = sum(any(node.name in excluded for node in layer.nodes) for layer in layers.layers)
    return f", {len(layers.layers) - excluded_count} of {len(layers.layers)} layers{reasons}"


def _first_difference(reference: Mapping[str, Any], execution: Execution) -> str:
    """Describe the first output or state that is not bit-equal to the reference; "" if there is none."""
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
    """Check that every transfer sent as many bytes as predicted.

    Args:
        predicted: The transfers of all roles (the plan, replicas and failure plans).
        sent: Sent bytes by transfer index.
        frames: Number of frames that each role computed.
        roles: Number of roles.
        role_noun: Word for the roles in the check's detail.
    """
    for transfer in predicted:
        expected, actual = transfer.value.nbytes * frames, sent.get(transfer.index, 0)
        if expected != actual:
            place = f"{transfer.value.name!r} {transfer.sender}→{transfer.receiver}"
            return Check("bytes", False, f"{place}: {actual} bytes sent, {expected} predicted")
    total = sum(transfer.value.nbytes for transfer in predicted)
    per_frame = "a frame" if roles == 1 else f"in a frame of each of {roles} {role_noun}"
    return Check("bytes", True, f"{len(predicted)} transfers, {total} bytes {per_frame}: as predicted")


def graph_inputs(model: Model) -> tuple[TensorSpec, ...]:
    """Return the graph inputs that are not initializers.

    Args:
        model: The network.

    Returns:
        Name, type and shape of each input, in graph order.
    """
    tensors = model.tensors()
    inputs = [tensors[value.name] for value in model.proto.graph.input]
    return tuple(TensorSpec(t.name, t.dtype, t.shape) for t in inputs if not t.is_constant)


def random_inputs(values: Sequence[TensorSpec], seed: int = 0) -> dict[str, NDArray[Any]]:
    """Draw seeded inputs: normally distributed floats, random bools, and integers from 0 to 7.

    Args:
        values: The inputs, with static shapes.
        seed: Seed of the random numbers.

    Returns:
        Arrays by input name.
    """
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
