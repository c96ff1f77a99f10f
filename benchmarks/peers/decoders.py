"""Compare the time of a decoder's token in dicompiler, distributed-llama and llama.cpp.

The decoder is the built-in network `llama_small` with one token and a cache of 128 positions: a Llama of 24 layers and
1024 features with 4-bit weights. The peers compute a network of the same sizes with random weights: distributed-llama
in its q40 format, llama.cpp in Q4_0. All programs use the same number of threads for each device.

Two and more devices are emulated boards: network namespaces that are joined by links of the given bandwidth. Computing
is not slowed down, so this host needs a processor for each device; with fewer, devices wait for each other. Each device
has one thread. The emulation needs root and iproute2. One device runs without emulation, with any number of threads.
dicompiler's plans are for the speeds of this host, because the benchmark first measures a token on one device, and
messages between emulated boards. The peers come from checkouts that you have built:

    make -C distributed-llama dllama
    cmake -S llama.cpp -B llama.cpp/build && cmake --build llama.cpp/build --target llama-bench
    pip install gguf
    python benchmarks/peers/decoders.py --distributed-llama distributed-llama --llama-cpp llama.cpp/build/bin

llama.cpp is measured on one device only. distributed-llama is measured on 1, 2, 4, … devices, because it refuses other
numbers.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import onnx

import dicompiler
from dicompiler import networks
from dicompiler.ir.cluster import Network
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.platform import Platform
from dicompiler.measure.emulation.boards import open_boards, options_on_boards, runtime_cost_factor
from dicompiler.measure.emulation.network import emulate_network
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.comparison import graph_inputs, random_inputs

LAYERS, FEATURES, HEADS, KV_HEADS, VOCABULARY, PAST = 24, 1024, 16, 4, 32_000, 128
INNER_FEATURES = 11 * FEATURES // 4
BLOCK = 32
"""Number of weights that share a scale in the 4-bit formats q40 (distributed-llama) and Q4_0 (llama.cpp)."""
Q40_BLOCK = np.dtype([("scale", "<f2"), ("values", "u1", BLOCK // 2)])
RATE, MEMORY_BANDWIDTH = 50e9, 10e9
"""Compute rate in FLOP/s and memory bandwidth in bytes/s of a board with relative speed 1, for dicompiler's plans.

A decoder reads all its weights for each token, so that the memory bandwidth limits its speed.
"""
WORKER_PORT = 9999
START_S = 2.0
"""Seconds until the workers of distributed-llama listen."""
DLLAMA_MAGIC, DLLAMA_LLAMA, DLLAMA_SILU, DLLAMA_Q40, DLLAMA_TOKENIZER_MAGIC = 0xA00ABCD, 0xABCD00, 1, 2, 0x567124


@dataclass(frozen=True)
class TokenCost:
    """Cost of a token in one of the compared programs.

    Attributes:
        seconds: Seconds of a token.
        bytes: Bytes that the first device sends for a token.
    """

    seconds: float
    bytes: float


@dataclass(frozen=True)
class Setting:
    """Settings that are the same for all compared programs.

    Attributes:
        devices: Number of devices.
        bandwidth: Bits per second of each link.
        threads: Threads of each device.
        tokens: Number of tokens of a measurement.
        speed: Speed of the boards relative to RATE and MEMORY_BANDWIDTH, for dicompiler's plans.
    """

    devices: int
    bandwidth: float
    threads: int
    tokens: int
    speed: float = 1.0

    @property
    def platform(self) -> Platform:
        """The platform: `devices` equal boards on a switch."""
        boards = Platform.load(f"rpi4x{self.devices}")
        devices = tuple(
            replace(device, rate=self.speed * RATE, memory_bandwidth=self.speed * MEMORY_BANDWIDTH)
            for device in boards.devices
        )
        return replace(boards, devices=devices, network=Network("switch", self.bandwidth))


Side = Callable[[], TokenCost]
"""A function that runs one of the compared programs and returns the cost of a token."""


def quantise_decoder(directory: Path) -> Path:
    """Write the decoder with 4-bit weights, and return its path."""
    model, quantised = directory / "decoder.onnx", directory / "decoder4.onnx"
    onnx.save(networks.build("llama_small", 0, size=1, past=PAST), model, save_as_external_data=True)
    words = ["opt", str(model), "-p", "quantise{weights=int4 activations=int8}", "-o", str(quantised)]
    subprocess.run(["dicompiler", *words], check=True, stdout=subprocess.DEVNULL)
    return quantised


def measure_speed(quantised: Path, setting: Setting, directory: Path) -> float:
    """Return the speed of this host relative to RATE and MEMORY_BANDWIDTH.

    It is the predicted time of a token on one board, divided by the measured time.
    """
    alone = replace(setting, devices=1)
    artifact = directory / "one-board"
    target = f"mpi{{threads={setting.threads}}}"
    compiled = dicompiler.compile(quantised, alone.platform, "single", target=target, output=artifact)
    inputs = random_inputs(graph_inputs(Model.load(quantised)))
    result = dicompiler.run(artifact, inputs, frames=setting.tokens, options=RunOptions(in_flight=1))
    assert compiled.metrics is not None
    return compiled.metrics.latency_s / statistics.median(result.frames_s[1:])


def compile_decoder(
    quantised: Path, artifact: Path, setting: Setting, target: str, strategy: str, wire_dtype: str | None
) -> Side:
    """Compile the quantised decoder with dicompiler, and return a function that runs it and returns a token's cost."""
    compiled = dicompiler.compile(
        quantised,
        setting.platform,
        strategy,
        target=f"{target}{{threads={setting.threads}}}",
        wire_dtype=wire_dtype if setting.devices > 1 else None,
        cost=f"analytic{{runtime={runtime_cost_factor(target, setting.devices):.3g}}}",
        output=artifact,
    )
    assert compiled.program is not None
    no_delay = {program.device: (0.0,) * len(program.segments) for program in compiled.program.devices}
    first = compiled.program.devices[0].device
    inputs = random_inputs(graph_inputs(Model.load(quantised)))

    def run() -> TokenCost:
        options = RunOptions(in_flight=1)
        with contextlib.ExitStack() as boards:
            if setting.devices > 1:
                emulation = boards.enter_context(open_boards(setting.platform, no_delay, first))
                options = options_on_boards(emulation, first, options)
            result = dicompiler.run(artifact, inputs, frames=setting.tokens + 1, options=options)
        sent = sum(result.reports[0].sent_bytes.values())
        return TokenCost(statistics.median(result.frames_s[1:]), sent / (setting.tokens + 1))

    return run


def write_dllama_model(path: Path) -> None:
    """Write a random model in the format of distributed-llama.

    Matrices are stored in the order of the file: the embedding in float32, then each layer's projections of queries,
    keys, values and outputs, its gate, down and up matrices, and its two norms.
    """
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> bytes:
        blocks = np.empty(rows * columns // BLOCK, Q40_BLOCK)
        blocks["scale"] = 0.005
        blocks["values"] = rng.integers(0, 256, blocks["values"].shape, np.uint8)
        return blocks.tobytes()

    keys = {
        0: 0, 1: DLLAMA_LLAMA, 2: FEATURES, 3: INNER_FEATURES, 4: LAYERS, 5: HEADS, 6: KV_HEADS, 7: 0, 8: 0,
        9: VOCABULARY, 10: 2 * PAST, 11: DLLAMA_SILU, 12: 10_000, 13: DLLAMA_Q40,
    }  # fmt: skip
    norm = np.ones(FEATURES, "<f4").tobytes()
    with path.open("wb") as file:
        file.write(_dllama_header(DLLAMA_MAGIC, keys))
        file.write(rng.standard_normal((VOCABULARY, FEATURES)).astype("<f4").tobytes())
        kv_features = FEATURES * KV_HEADS // HEADS
        for _ in range(LAYERS):
            for rows in (FEATURES, kv_features, kv_features, FEATURES, INNER_FEATURES):
                file.write(matrix(rows, FEATURES))
            file.write(matrix(FEATURES, INNER_FEATURES) + matrix(INNER_FEATURES, FEATURES) + norm + norm)
        file.write(norm + matrix(VOCABULARY, FEATURES))


def write_dllama_tokenizer(path: Path) -> None:
    """Write a tokenizer whose first 256 tokens are single bytes, so that it can encode any prompt."""
    tokens = [bytes([value]) for value in range(256)] + [f"<{value}>".encode() for value in range(256, VOCABULARY)]
    keys = {0: 1, 1: VOCABULARY, 2: max(map(len, tokens)), 3: VOCABULARY - 2, 9: 1, 10: 1}
    with path.open("wb") as file:
        file.write(_dllama_header(DLLAMA_TOKENIZER_MAGIC, keys) + struct.pack("<i", VOCABULARY - 1))
        for token in tokens:
            file.write(struct.pack("<fI", 0.0, len(token)) + token)


def _dllama_header(magic: int, keys: Mapping[int, int]) -> bytes:
    """Return a header of distributed-llama: the magic number, the header's size in bytes, and pairs of integers."""
    pairs = b"".join(struct.pack("<ii", *pair) for pair in keys.items())
    return struct.pack("<ii", magic, 8 + len(pairs)) + pairs


def prepare_dllama(checkout: Path, directory: Path, setting: Setting) -> Side:
    """Return a function that runs distributed-llama and returns a token's cost: a root and workers, each on a board."""
    model, tokenizer = directory / "decoder.m", directory / "decoder.t"
    write_dllama_model(model)
    write_dllama_tokenizer(tokenizer)
    program, threads = checkout / "dllama", f"--nthreads {setting.threads}"
    root_words = (
        f"inference --model {model} --tokenizer {tokenizer} --prompt a --steps {setting.tokens} --temperature 0"
        f" --max-seq-len {2 * PAST} --buffer-float-type q80 {threads}"
    ).split()

    def run() -> TokenCost:
        hosts = [host.name for host in setting.platform.hosts]
        with emulate_network(setting.platform) as network, contextlib.ExitStack() as workers:
            for host in hosts[1:]:
                words = f"worker --host {network.addresses[host]} --port {WORKER_PORT} {threads}".split()
                with network.enter_host(host):
                    workers.enter_context(_running([str(program), *words]))
            addresses = [f"{network.addresses[host]}:{WORKER_PORT}" for host in hosts[1:]]
            time.sleep(START_S if addresses else 0)
            with network.enter_host(hosts[0]):
                done = subprocess.run(
                    [program, *root_words, *(["--workers", *addresses] if addresses else [])],
                    capture_output=True, check=True, text=True,
                )  # fmt: skip
        prediction = done.stdout[done.stdout.rindex("Prediction") :]
        sent = [1024 * int(kilobytes) for kilobytes in re.findall(r"Pred.*Sent *(\d+) kB", done.stdout)]
        (milliseconds,) = re.findall(r"\(([\d.]+) ms/tok\)", prediction)
        return TokenCost(float(milliseconds) / 1000, statistics.median(sent))

    return run


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[None]:
    """Run a program until the end of the `with` block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def write_gguf(path: Path) -> None:
    """Write a random model in llama.cpp's format, with Q4_0 matrices and a tokenizer without merges."""
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType

    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(2 * PAST)
    writer.add_embedding_length(FEATURES)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER_FEATURES)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<{number}>" for number in range(3, VOCABULARY))]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types(
        [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.NORMAL] * (VOCABULARY - 3)
    )

    def matrix(name: str, rows: int, columns: int) -> None:
        blocks = np.empty((rows, columns // BLOCK), Q40_BLOCK)
        blocks["scale"] = 0.005
        blocks["values"] = rng.integers(0, 256, blocks["values"].shape, np.uint8)
        data = blocks.view(np.uint8).reshape(rows, -1)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType.Q4_0)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(FEATURES, np.float32))

    matrix("token_embd", VOCABULARY, FEATURES)
    matrix("output", VOCABULARY, FEATURES)
    norm("output_norm")
    kv_features = FEATURES * KV_HEADS // HEADS
    for number in range(LAYERS):
        block = f"blk.{number}"
        norm(f"{block}.attn_norm")
        norm(f"{block}.ffn_norm")
        for name, rows, columns in (
            ("attn_q", FEATURES, FEATURES),
            ("attn_k", kv_features, FEATURES),
            ("attn_v", kv_features, FEATURES),
            ("attn_output", FEATURES, FEATURES),
            ("ffn_gate", INNER_FEATURES, FEATURES),
            ("ffn_up", INNER_FEATURES, FEATURES),
            ("ffn_down", FEATURES, INNER_FEATURES),
        ):
            matrix(f"{block}.{name}", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def prepare_llama_cpp(programs: Path, directory: Path, setting: Setting) -> Side:
    """Return a function that runs llama.cpp on one device, with llama-bench, and returns a token's cost."""
    model = directory / "decoder.gguf"
    write_gguf(model)
    words = f"-m {model} -t {setting.threads} -p 0 -n {setting.tokens} -r 1 -o json".split()

    def run() -> TokenCost:
        done = subprocess.run([programs / "llama-bench", *words], capture_output=True, check=True, text=True)
        (generation,) = json.loads(done.stdout)
        return TokenCost(1 / float(generation["avg_ts"]), 0)

    return run


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--distributed-llama", "dllama", type=click.Path(exists=True, path_type=Path), help="Built checkout.")
@click.option("--llama-cpp", type=click.Path(exists=True, path_type=Path), help="Directory with llama-bench.")
@click.option("--devices", default=1, help="Number of devices.")
@click.option("--mbits", default=1000.0, help="Bandwidth of each link in Mbit/s.")
@click.option("--threads", default=1, help="Threads of each device.")
@click.option("--target", "targets", multiple=True, default=["sockets", "mpi"], help="Targets of dicompiler.")
@click.option("--strategy", default="auto", help="Strategy of dicompiler.")
@click.option("--wire-dtype", default="int8-block", help="Wire type of dicompiler.")
@click.option("--tokens", default=40, help="Tokens of each measurement.")
@click.option("--rounds", default=3, help="How often each side is measured, in turn.")
def main(
    dllama: Path | None,
    llama_cpp: Path | None,
    devices: int,
    mbits: float,
    threads: int,
    targets: Sequence[str],
    strategy: str,
    wire_dtype: str,
    tokens: int,
    rounds: int,
) -> None:
    if devices > 1 and threads > 1:
        raise click.UsageError("--threads: dicompiler uses one thread for each emulated board: use --threads 1")
    setting = Setting(devices, 1e6 * mbits, threads, tokens)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        quantised = quantise_decoder(place)
        setting = replace(setting, speed=measure_speed(quantised, setting, place))
        sides = {
            f"dicompiler {target}": compile_decoder(quantised, place / target, setting, target, strategy, wire_dtype)
            for target in targets
        }
        if dllama and devices.bit_count() == 1:
            sides["distributed-llama"] = prepare_dllama(dllama, place, setting)
        if llama_cpp and devices == 1:
            sides["llama.cpp"] = prepare_llama_cpp(llama_cpp, place, setting)
        costs: dict[str, list[TokenCost]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in list(sides)[:: 1 if number % 2 else -1]:
                costs[name].append(sides[name]())
    click.echo(f"{devices} devices, {mbits:g} Mbit/s, {threads} threads each")
    click.echo("| side | ms a token | kB that the first device sends |\n|---|---|---|")
    for name, found in costs.items():
        milliseconds = 1000 * statistics.median(cost.seconds for cost in found)
        kilobytes = statistics.median(cost.bytes for cost in found) / 1000
        click.echo(f"| {name} | {milliseconds:.1f} | {kilobytes:.0f} |")


if __name__ == "__main__":
    main()
