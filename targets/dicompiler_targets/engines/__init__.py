"""The built-in engines: onnxruntime, and ncnn.

    onnxruntime.py       the default engine, which runs ONNX files
    ncnn.py              the engine ncnn, and the memory that it needs for a segment
    ncnn_converter.py    ONNX submodel ⇒ the files of an ncnn network

The modules that boards need to run a network are in the runtimes of the targets.
"""
