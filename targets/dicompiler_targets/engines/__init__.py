"""The built-in engines: onnxruntime, and ncnn.

    onnxruntime.py       the default engine, which runs ONNX files
    ncnn.py              the engine ncnn
    ncnn_converter.py    ONNX sub-model ⇒ the files of an ncnn network
    ncnn_memory.py       the memory that ncnn needs for a segment

The modules that boards need to run a network are in the runtimes of the targets.
"""
