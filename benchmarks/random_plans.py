"""Check many random networks under random plans, as tests/test_random_plans.py does for a few.

A pair of a network and a plan is wrong if its outputs are not bit-equal to those of the network, or if it sends other
bytes than predicted. The script prints the wrong pairs, and the number of pairs.
"""

from __future__ import annotations

import logging
import sys
from random import Random

import click
import numpy as np
import onnx
from support.generators import integers, random_model, random_plan
from support.layer_graphs import rules

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass


def fault(seed: int) -> str:
    """Return a description of the error of the network and plan with this seed; "" if they are correct."""
    rng = Random(seed)
    model = Model.load(onnx.shape_inference.infer_shapes(random_model(rng)))
    layers = form_layers(model, rules())
    plan = random_plan(rng, layers)
    placed = PartitionPass().run(PipelineState(model=model, layers=layers, plan=plan))
    placed.model.check("partition")
    inputs = integers(rng, model.proto)
    reference = run_model(model, inputs)
    program = build_program(placed.model, plan.devices)
    execution = ProgramExecutor(program).run(inputs)
    for device, outputs in execution.delivered.items():
        for name, value in outputs.items():
            if not np.array_equal(reference[name], value):
                return f"output {name} on {device} differs"
    assert placed.routing is not None
    if not sum(execution.sent) == sum(t.value.nbytes for t in program.transfers) == placed.routing.total_bytes:
        return "other bytes were sent than predicted"
    return ""


@click.command()
@click.argument("count", type=click.IntRange(min=1), default=10_000)
@click.argument("first", type=click.IntRange(min=0), default=0)
def main(count: int, first: int) -> None:
    """Try COUNT pairs from seed FIRST on. The exit code is 1 if one is wrong."""
    # Random plans have many parts that nothing reads; hide the warnings about them.
    logging.disable(logging.WARNING)
    faults = 0
    for seed in range(first, first + count):
        try:
            message = fault(seed)
        except DicompilerError as error:
            message = str(error)
        if message:
            faults += 1
            click.echo(f"seed {seed}: {message}")
    click.echo(f"{count} pairs, {faults} faults")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
