"""Classify a camera's pictures on several devices: read raw RGB from stdin, print a line per picture.

    ffmpeg -f v4l2 -i /dev/video0 -vf scale=224:224 -pix_fmt rgb24 -f rawvideo - | python camera.py build

`build` is an artifact of `dicompiler compile` for a network with one input of 1x3xHxW. Pictures that arrive while the
devices are busy are dropped, except the newest, so that results are up to date. `--every` classifies all pictures.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

import dicompiler

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
"""Mean and standard deviation of ImageNet, per channel; replace them if your network was trained on other data."""


def pictures(stream: BinaryIO, height: int, width: int, every: bool) -> Iterator[np.ndarray]:
    """Yield the pictures of a stream as float32 of 1x3xHxW: all of them, or the newest at each request."""
    waiting: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        while len(raw := stream.read(height * width * 3)) == height * width * 3:
            waiting.put(raw)
        waiting.put(b"")

    threading.Thread(target=read, daemon=True).start()
    while raw := waiting.get():
        while not every and not waiting.empty() and (newer := waiting.get()):
            raw = newer
        pixels = np.frombuffer(raw, np.uint8).reshape(height, width, 3).astype(np.float32) / 255
        yield ((pixels - MEAN) / DEVIATION).transpose(2, 0, 1)[None]


def main() -> None:
    """Print number, class and seconds since the start for each picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="the artifact of dicompiler compile")
    parser.add_argument("--size", default="224x224", help="height x width of a picture")
    parser.add_argument("--input", default="input", help="name of the network's input")
    parser.add_argument("--every", action="store_true", help="drop no picture")
    options = parser.parse_args()
    height, width = map(int, options.size.split("x"))
    start = time.monotonic()
    with dicompiler.connect(options.directory) as session:
        frames = ({options.input: picture} for picture in pictures(sys.stdin.buffer, height, width, options.every))
        for number, outputs in enumerate(session.stream(frames)):
            (scores,) = outputs.values()
            print(number, scores.argmax(), f"{time.monotonic() - start:.2f}", flush=True)


if __name__ == "__main__":
    main()
