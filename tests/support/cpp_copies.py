"""The strided copies of the MPI runtime: tensor.cc as a library, called from Python."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dicompiler_targets.mpi
from dicompiler_targets.artifact_files import StridedCopy
from dicompiler_targets.mpi import toolchain

RUNTIME = Path(dicompiler_targets.mpi.__file__).with_name("runtime")
SHIM = """
#include "tensor.cc"
using namespace dicompiler;
struct PreparedCopy { Tensor source, target; StridedCopy strided; };
static Tensor make_tensor(const std::size_t* at) {
    Tensor tensor;
    tensor.type = Type::uint8;
    tensor.shape = {static_cast<std::int64_t>(at[1])};
    tensor.data = reinterpret_cast<void*>(at[0]);
    return tensor;
}
// For each copy: source, its bytes, target, its bytes, offsets, block size, number of loops, and the loops.
extern "C" void* prepare(const std::size_t* at, std::size_t count) {
    auto* copies = new std::vector<PreparedCopy>;
    for (; count > 0; --count) {
        copies->push_back({make_tensor(at), make_tensor(at + 2), {at[4], at[5], at[6], {}}});
        std::size_t loops = at[7];
        for (at += 8; loops > 0; --loops, at += 3) {
            copies->back().strided.loops.push_back({at[0], at[1], at[2]});
        }
    }
    return copies;
}
extern "C" int run(const void* copies) {
    try {
        for (const auto& entry : *static_cast<const std::vector<PreparedCopy>*>(copies)) {
            copy(entry.strided, entry.source, entry.target);
        }
    } catch (const Error&) {
        return 1;
    }
    return 0;
}
"""


def prepared(copies: Sequence[StridedCopy], memory: Mapping[str, Any]) -> Callable[[], bool]:
    """Return a function that copies between arrays, which must not move; it returns False if a copy is refused.

    The copies must give their sources and targets by name, not by index.
    """
    library = load_library()
    numbers: list[int] = []
    for copy in copies:
        for name in (copy.source, copy.target):
            assert isinstance(name, str)
            numbers += [memory[name].ctypes.data, memory[name].nbytes]
        numbers += [copy.source_offset, copy.target_offset, copy.run_bytes, len(copy.loops)]
        numbers += [number for loop in copy.loops for number in loop]
    handle = library.prepare((ctypes.c_size_t * len(numbers))(*numbers), ctypes.c_size_t(len(copies)))
    return lambda: library.run(ctypes.c_void_p(handle)) == 0


@functools.cache
def load_library() -> Any:
    """Build tensor.cc as programs are built, and load it."""
    with tempfile.TemporaryDirectory() as scratch:
        source, shared_object = Path(scratch, "shim.cc"), Path(scratch, "shim.so")
        source.write_text(SHIM, encoding="utf-8")
        options = ["-std=c++17", "-O3", "-Wall", "-shared", "-fPIC", f"-I{RUNTIME}"]
        subprocess.run([toolchain.find_program("g++"), *options, source, "-o", shared_object], check=True)
        library = ctypes.CDLL(str(shared_object))
    library.prepare.restype = ctypes.c_void_p
    return library
