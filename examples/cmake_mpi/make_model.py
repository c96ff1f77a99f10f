"""Create the model and the input of this example: `python3 make_model.py lenet.onnx digit.npz`.

The model is LeNet with seeded random weights. Replace it by your own.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx

from dicompiler.networks import build

model_path, inputs_path = sys.argv[1:]
onnx.save(build("lenet"), model_path)
np.savez(inputs_path, input=np.random.default_rng(0).standard_normal((1, 1, 32, 32)).astype(np.float32))
