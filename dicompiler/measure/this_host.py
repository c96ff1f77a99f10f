"""This host as a platform: one device with all cores, whose rate and memory bandwidth are measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from dicompiler.analysis.prediction_error import available_processors
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.platform import THIS_HOST, Platform

MATRIX_SIZE = 1024
COPIED_BYTES = 1 << 27
"""Bytes of the array that is copied to measure the memory bandwidth: more than the caches of processors have."""
REPEAT_COUNT = 7
_DESCRIPTION = (
    f"This host. Rate: product of two float32 matrices of {MATRIX_SIZE} rows and columns in numpy, the fastest of"
    f" {REPEAT_COUNT}. Memory: copying {COPIED_BYTES >> 20} MiB in numpy, read and written bytes. Powers are unknown."
    " The network is not used, because there is one host."
)


def measure_this_host() -> Platform:
    """Measure this host for about a second, and return it as the platform "this" with one device.

    Its rate is in FLOP/s (float32), and its memory bandwidth in byte/s.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    a = np.random.default_rng(0).standard_normal((MATRIX_SIZE, MATRIX_SIZE), np.float32)
    product, copied = np.empty_like(a), np.zeros(COPIED_BYTES, np.uint8)
    rate = 2 * MATRIX_SIZE**3 / _shortest_seconds(lambda: np.matmul(a, a, out=product))
    target = np.zeros_like(copied)
    bandwidth = 2 * COPIED_BYTES / _shortest_seconds(lambda: np.copyto(target, copied))
    device = Device(
        THIS_HOST, THIS_HOST, float(f"{rate:.3g}"), available_processors(), memory_bandwidth=float(f"{bandwidth:.3g}")
    )
    return Platform(THIS_HOST, (Host(THIS_HOST, memory),), (device,), Network("switch", 1e9), _DESCRIPTION)


def _shortest_seconds(work: Callable[[], object]) -> float:
    """Return the shortest seconds of a call of `work`, without the first one, which allocates memory."""
    work()
    seconds = []
    for _ in range(REPEAT_COUNT):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
