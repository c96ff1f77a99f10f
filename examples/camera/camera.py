"""Classify a camera's pictures on several devices: read raw RGB from stdin, print a line per picture.

    ffmpeg -f v4l2 -i /dev/video0 -vf scale=224:224 -pix_fmt rgb24 -f rawvideo - | python camera.py build

`build` is an artifact of `dicompiler compile` for a network with one input of 1x3xHxW. Pictures that arrive while the
devices are busy are dropped, except the newest. Each line shows the age of its picture: the time since it was read from
stdin. `--every` classifies all pictures, so their age grows if the camera is faster than the devices.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import numpy as np

import dicompiler

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
"""Mean and standard deviation of ImageNet, per channel; replace them if your network was trained on other data."""


def read_picture(stream: FileIO, size: int) -> bytes:
    """Return the next `size` bytes; fewer at the end of the stream."""
    raw = b""
    while len(raw) < size and (more := stream.read(size - len(raw))):
        raw += more
    return raw


def pictures(stream: FileIO, height: int, width: int, every: bool) -> Iterator[tuple[float, np.ndarray]]:
    """Yield pictures and the times at which they were read: all of a stream, or the newest at each request.

    Pictures are float32 of 1x3xHxW.
    """
    waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def read() -> None:
        while len(raw := read_picture(stream, height * width * 3)) == height * width * 3:
            waiting.put((time.monotonic(), raw))
        waiting.put((0.0, b""))

    threading.Thread(target=read, daemon=True).start()
    taken, raw = waiting.get()
    while raw:
        while not every and not waiting.empty():
            newer = waiting.get()
            if not newer[1]:
                waiting.put(newer)  # The mark of the end must follow the newest picture.
                break
            taken, raw = newer
        pixels = np.frombuffer(raw, np.uint8).reshape(height, width, 3).astype(np.float32) / 255
        yield taken, ((pixels - MEAN) / DEVIATION).transpose(2, 0, 1)[None]
        taken, raw = waiting.get()


def select_output(outputs: dict[str, np.ndarray], name: str | None) -> np.ndarray:
    """Return the output with this name; None means the only output."""
    if name is None and len(outputs) == 1:
        name = next(iter(outputs))
    if name not in outputs:
        raise dicompiler.DicompilerError(f"the network's outputs are {', '.join(outputs)}: give one with --output")
    return outputs[name]


def main() -> None:
    """Print number, class and age in milliseconds for each picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="the artifact of dicompiler compile")
    parser.add_argument("--size", default="224x224", help="height x width of a picture")
    parser.add_argument("--input", default="input", help="name of the network's input")
    parser.add_argument("--output", help="name of the output with the classes, if the network has several outputs")
    parser.add_argument("--every", action="store_true", help="drop no picture")
    parser.add_argument("--in-flight", type=int, default=2, help="pictures in flight: fewer give newer results")
    options = parser.parse_args()
    # With the buffered sys.stdin, the reading thread would hold its lock, and Python could not end after Ctrl-C.
    source = FileIO(sys.stdin.fileno(), closefd=False)
    height, width = map(int, options.size.split("x"))
    in_flight: queue.Queue[float] = queue.Queue()  # Times at which the pictures in flight were read.

    def frames() -> Iterator[dict[str, np.ndarray]]:
        for taken, picture in pictures(source, height, width, options.every):
            in_flight.put(taken)
            yield {options.input: picture}

    with dicompiler.connect(options.directory, dicompiler.RunOptions(in_flight=options.in_flight)) as session:
        for number, outputs in enumerate(session.stream(frames())):
            scores = select_output(outputs, options.output)
            age_ms = 1000 * (time.monotonic() - in_flight.get())
            print(number, scores.argmax(), f"{age_ms:.0f} ms old", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except dicompiler.DicompilerError as error:
        hint = ": give its name with --input" if "has no input" in str(error) else ""
        sys.exit(f"camera: {error}{hint}")
