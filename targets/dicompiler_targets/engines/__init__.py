"""The built-in engines: onnxruntime, ncnn and MNN.

    onnxruntime.py       the default engine, which runs ONNX files
    ncnn.py              the engine ncnn, and the memory that it needs for a segment
    ncnn_converter.py    ONNX submodel ⇒ the files of an ncnn network
    mnn.py               the engine MNN, and the memory that it needs for a segment
    mnn_operators.py     the nodes that MNN computes as onnxruntime does
    mnn_converter.py     ONNX submodel ⇒ the files of an MNN network, by MNN's converter
    mnn_worker.py        the process in which MNN's converter runs
    static_shapes.py     the shapes of a submodel's tensors

The modules that boards need to run a network are in the runtimes of the targets.
"""
