"""IR: the values that flow through the compiler, each a frozen record, and nothing that decides or transforms.

In: what `base` gives. Out: regions, operator rules, layers, plans, platforms, tasks, routings, programs, metrics, and
the Compilation that holds them.   The ONNX model itself is in `ir.onnx`.
"""
