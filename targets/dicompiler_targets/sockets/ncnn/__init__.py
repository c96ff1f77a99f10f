"""The engine ncnn: conversion of segments, and the check that they compute what onnxruntime computes.

    converter.py    ONNX sub-model ⇒ the files of an ncnn network
    segments.py     which segments of a program ncnn computes
    memory.py       the memory that ncnn needs for a segment

Targets import this package only if the engine is chosen.
"""
