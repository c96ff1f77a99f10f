"""What the MPI runtime copies in C++, called from here: tensor.cc as a library.

In: copies, memory by name. Out: a call that makes them all.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dicompiler_targets.mpi
from dicompiler_targets.boxes import StridedCopy
from dicompiler_targets.mpi import toolchain

RUNTIME = Path(dicompiler_targets.mpi.__file__).with_name("runtime")
SHIM = """
#include "tensor.cc"
using namespace dicompiler;
struct Ready { Tensor source, target; Box box; };
static Tensor memory(const std::size_t* at) {
    Tensor made;
    made.type = Type::uint8;
    made.shape = {static_cast<std::int64_t>(at[1])};
    made.data = reinterpret_cast<void*>(at[0]);
    return made;
}
// Of each copy: source and its bytes, target and its bytes, start, to, run, how many loops, these.
extern "C" void* ready(const std::size_t* at, std::size_t count) {
    auto* found = new std::vector<Ready>;
    for (; count > 0; --count) {
        found->push_back({memory(at), memory(at + 2), {at[4], at[5], at[6], {}}});
        std::size_t loops = at[7];
        for (at += 8; loops > 0; --loops, at += 3) found->back().box.loops.push_back({at[0], at[1], at[2]});
    }
    return found;
}
extern "C" int copied(const void* all) {
    try {
        for (const auto& one : *static_cast<const std::vector<Ready>*>(all)) copy(one.box, one.source, one.target);
    } catch (const Error&) {
        return 1;
    }
    return 0;
}
"""


def prepared(copies: Sequence[StridedCopy], memory: Mapping[str | int, Any]) -> Callable[[], bool]:
    """Makes these copies between arrays, which must stay where they are; False where one is refused."""
    own = library()
    numbers: list[int] = []
    for one in copies:
        for name in (one.source, one.target):
            numbers += [memory[name].ctypes.data, memory[name].nbytes]
        numbers += [
            one.source_offset,
            one.target_offset,
            one.run_bytes,
            len(one.loops),
            *(n for loop in one.loops for n in loop),
        ]
    ready = own.ready((ctypes.c_size_t * len(numbers))(*numbers), ctypes.c_size_t(len(copies)))
    return lambda: own.copied(ctypes.c_void_p(ready)) == 0


@functools.cache
def library() -> Any:
    """Built as programs are."""
    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch, "shim.cc"), Path(scratch, "shim.so")
        source.write_text(SHIM, encoding="utf-8")
        options = ["-std=c++17", "-O3", "-Wall", "-shared", "-fPIC", f"-I{RUNTIME}"]
        subprocess.run([toolchain.find_program("g++"), *options, source, "-o", made], check=True)
        own = ctypes.CDLL(str(made))
    own.ready.restype = ctypes.c_void_p
    return own
