"""One command line for most subcommands, for tests of their output."""

from __future__ import annotations

SEARCH = "--generations 3 --population 10"
LINES = {
    "compile": "compile tiny.onnx --platform rpi4x2 --strategy modnn -o net",
    "run": "run net --frames 2",
    "emulate": "emulate net --frames 3 --slower 20 --log emulated.json",
    "calibrate": "calibrate emulated.json --force -o calibrated.toml",
    "keys": "keys net",
    "verify": "verify net",
    "plan": "plan tiny.onnx --platform rpi4x2 --strategy modnn -o plan.json",
    "compare": "compare tiny.onnx --platform rpi4x2 --strategies single,stahl,modnn",
    "explore": f"explore tiny.onnx --platform rpi4x2 {SEARCH} -o front",
    "simulate": "simulate tiny.onnx --platform rpi4x2 --plan plan.json --frames 3",
    "report": "report net -o report.html",
    "profile": "profile tiny.onnx --repeat 1 --tiles 1,2 --target none -o profile.json",
    "platform": "platform rpi4x2 -o cluster.toml",
    "opt": "opt tiny.onnx -p infer-shapes,form-layers,tile-height{layers=stem} --timing --statistics"
    " --save-plan own.json -o split.onnx",
    "demo": "demo --network tiny --platform rpi4x2 --strategy modnn",
}
