"""The Model: an ONNX protobuf with the structure, and the weights as views of the mapped file.

In: a file, bytes or a ModelProto. Out: a Model, its digest, a file again; and the graph as passes edit it.
Nothing else reads or writes ONNX files.
"""
