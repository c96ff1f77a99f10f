"""Writes what this example compiles and runs: `python3 make_model.py lenet.onnx digit.npz`.

Nothing goes in; a LeNet with seeded random weights comes out, and one input for it. Your project has its own model.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx

from dicompiler.networks import build

model, inputs = sys.argv[1:]
onnx.save(build("lenet"), model)
np.savez(inputs, input=np.random.default_rng(0).standard_normal((1, 1, 32, 32)).astype(np.float32))
