"""`Problem.evaluate` in a form that can be sent to other processes.

Plan → Metrics. Weights stay at home: what a plan comes to does not depend on their values, and there may be gigabytes.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import onnx

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import Weight, raw_nbytes
from dicompiler.ir.plan import Plan


class Evaluates(Protocol):
    """What a Problem is here; see there."""

    @property
    def model(self) -> Model | None: ...

    def estimate(self, plan: Plan) -> Metrics: ...

    def evaluate(self, plan: Plan) -> Metrics: ...


@dataclass(frozen=True)
class RemoteEvaluator:
    """`Problem.evaluate`; of a problem without a model `Problem.estimate`."""

    problem: Evaluates

    def __call__(self, plan: Plan) -> Metrics:
        """What `plan` comes to. Raises as `Problem.evaluate`."""
        return self.problem.estimate(plan) if self.problem.model is None else self.problem.evaluate(plan)

    def attempt(self, plan: Plan) -> Metrics | DicompilerError:
        """The same, but what cannot be evaluated gives its error."""
        try:
            return self(plan)
        except DicompilerError as error:
            return error

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self._parcel,)

    @cached_property
    def _parcel(self) -> bytes:
        """What travels, the same for every plan."""
        whole: Any = self.problem
        model = self.problem.model
        problem = replace(whole, executor=None, model=None, loaded=None)
        if model is None:
            return pickle.dumps((problem, None, {}))
        weights = {name: (weight.dtype, weight.shape) for name, weight in model.weights.items()}
        return pickle.dumps((problem, model.proto.SerializeToString(), weights))


@lru_cache(maxsize=1)  # so that what one plan makes known of the layers serves the next one
def _restored(parcel: bytes) -> RemoteEvaluator:
    """The evaluator in another process, with zeros for weights (which take no memory until somebody reads them)."""
    problem, proto, weights = pickle.loads(parcel)
    if proto is None:
        return RemoteEvaluator(problem)
    hollow = {
        name: Weight(dtype, shape, np.zeros(raw_nbytes(dtype, shape), np.uint8).data)
        for name, (dtype, shape) in weights.items()
    }
    return RemoteEvaluator(replace(problem, model=Model(onnx.ModelProto.FromString(proto), hollow)))
