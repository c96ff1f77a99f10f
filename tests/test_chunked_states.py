"""Caches as states with several new rows per frame: a prompt in one frame, then single tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dicompiler import networks
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.program import Program
from dicompiler.search.problem import Problem
from dicompiler.testing import make_cluster
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler_strategies.transformer_heads import Heads

PAST, NEW, TOKENS = 8, 3, np.array([[3, 1, 4, 1, 5, 9, 2]])
SMALL: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 4, "kv_heads": 2, "vocabulary": 20}


def posed(size: int, static: bool) -> Problem:
    model = networks.build("llama_small", 1, **SMALL, size=size, past=PAST, static=static)
    return load_problem(model, make_cluster("switch", 1, 1), objective="memory", state=["auto"])


def programmed(problem: Problem) -> Program:
    """Return the program by heads on two devices, each of which keeps its part of the caches."""
    compilation = problem.draft_program(Heads().plan(problem))
    assert compilation.routing is not None and compilation.program is not None
    assert len({kept.device for kept in compilation.routing.state_retentions}) == 2
    return compilation.program


def frame(start: int, size: int, static: bool) -> dict[str, Any]:
    """Return the tokens of a range. In growing caches the rows are at the end, and the mask selects them."""
    places, ids = np.arange(start, start + size), TOKENS[:, start : start + size]
    if static:
        return {"input_ids": ids, "cache_position": places}
    mask = (np.arange(PAST + size) >= PAST - start).astype(np.int64)[None]
    return {"input_ids": ids, "position_ids": places[None], "attention_mask": mask}


def expected() -> np.ndarray:
    """Return the logits of all tokens at once."""
    whole = Model.load(networks.build("llama_small", 1, **SMALL, size=TOKENS.size))
    return np.asarray(next(iter(run_model(whole, {"input_ids": TOKENS}).values())))


@pytest.mark.parametrize("static", [False, True])
def test_frames_of_three_tokens_continue(static: bool) -> None:
    executor = ProgramExecutor(programmed(posed(NEW, static)))
    for start in (0, NEW):
        (logits,) = executor.run(frame(start, NEW, static)).outputs.values()
        assert np.allclose(logits, expected()[:, start : start + NEW], atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
def test_prompt_frame_provides_caches_of_single_steps(static: bool) -> None:
    """Two networks have the same weights: the first one's caches are the second one's initial states."""
    prompt = Model.load(networks.build("llama_small", 1, **SMALL, size=NEW, past=PAST, static=static))
    shapes = {name: tensor.shape for name, tensor in prompt.tensors().items()}
    zeros = {name: np.zeros(shapes[name] or (), np.float32) for name in shapes if name.startswith("past_key_values")
             and name.count(".") == 2 and name.endswith(("key", "value"))}  # fmt: skip
    made = run_model(prompt, {**zeros, **frame(0, NEW, static)})
    given = {past: made[past.replace("past_key_values", "present")][:, :, -PAST:] for past in zeros}
    executor = ProgramExecutor(programmed(posed(1, static)))
    for start in range(NEW, TOKENS.size):
        (logits,) = executor.run({**frame(start, 1, static), **(given if start == NEW else {})}).outputs.values()
        assert np.allclose(logits, expected()[:, start : start + 1], atol=1e-5)
