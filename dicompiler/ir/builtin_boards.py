"""Hardware data of the boards in the built-in platforms: rates, memory, power and network.

The description of each board names the sources of its data. Compute rates are sustained rates, not peaks, because
strategies balance the work by them. Use profiles of your own boards if you can.
"""

from __future__ import annotations

from dataclasses import dataclass

from dicompiler.ir.cluster import Device, EngineRate, Host, Network

KIB, MIB, GIB = 2**10, 2**20, 2**30

_GATEWAY = " Network: CoopAI's gateway, which all boards share at 100 Mbit/s, without latency."
# Source of the compute rates with the engine ncnn: the times of AlexNet, VGG16, ResNet-18, ResNet-50, MobileNetV2 and
# SqueezeNet with four threads in ncnn's benchmark/README.md (commit a4d2ea1). The table has no time of VGG16 for the
# Raspberry Pi 3.
# - The rates are fitted to these times, from which the time of reading the weights of dense layers is subtracted.
# - They are then scaled from the clocks in the table (Pi 4: 1.8 GHz, Pi 3: 1.4 GHz) to the clocks of the boards below.
# - Ratio of the fitted to the published times: 0.67 to 1.20 for the Pi 4 (SqueezeNet: 0.49), and 1.00 to 1.34 for the
#   Pi 3 (SqueezeNet: 0.61).
_NCNN_NOTE = (
    " Rates with ncnn by kind of layer: fitted to ncnn's published benchmark (benchmark/README.md), scaled to this"
    " clock."
)
_PI3_DESCRIPTION = (
    "Raspberry Pi 3 B: four Cortex-A53 at 1.2 GHz, 1 GB (CoopAI, section V). 3.75 GFLOP/s: Linpack on 16 such boards"
    " reaches up to 60 GFLOP/s (Basford et al., Performance analysis of single board computer clusters, 2019). Memory:"
    " 2 GB/s is an assumption, just over half of the peak of 32 bits of LPDDR2 at 900 MT/s. Power: 1.4 W idle,"
    " 3.7 W with four cores busy (Pi Dramble's measurements)." + _NCNN_NOTE + _GATEWAY
)
_PI4_DESCRIPTION = (
    "Raspberry Pi 4: four Cortex-A72 at 1.5 GHz, 4 GB, 13.6 GFLOP/s (CoopAI, section V). Memory:"
    " 4.84 GB/s, STREAM's Triad (sci-pi.org.uk, Stream). Power: 2.7 W idle, 6.4 W with"
    " four cores busy (Pi Dramble's measurements)." + _NCNN_NOTE
)
_TOP500 = "geerlingguy/top500-benchmark, README"
_GIGABIT = " Network: a gigabit switch, of which TCP gets 941 Mbit/s; latency 0.1 ms is an assumption."
# The rate of 60.5 GFLOP/s lies between the rates of two networks in onnxruntime on a Raspberry Pi 5. YOLO11n (6.5
# GFLOP) takes 168 ms, which is 39 GFLOP/s. YOLO11s (21.5 GFLOP) takes 324 ms, which is 66 GFLOP/s (Ultralytics' guide
# for Raspberry Pi, release 8.3.39).
_PI5_DESCRIPTION = (
    "Raspberry Pi 5: four Cortex-A76 at 2.4 GHz, 8 GB. 60.5 GFLOP/s in float32: twice the 30.249 GFLOP/s of Linpack in"
    f" float64 ({_TOP500}). Memory: 10 GB/s is an assumption, 60 % of the peak of 32 bits of LPDDR4X at 4267 MT/s."
    " Power: 11 W with four cores busy (the same Linpack run); 4 W idle (geerlingguy/pi-isp, issue 6). Convolutions"
    " with ncnn: 2.09 times this rate, the median of 13 detectors in float32 (visionanalysis.org, ncnn FP32 vs ONNX"
    f" FP32 on Raspberry Pi 5).{_GIGABIT}"
)
_ORANGE_PI5_DESCRIPTION = (
    "Orange Pi 5: RK3588S with four Cortex-A76 and four Cortex-A55, 8 GB. 107 GFLOP/s in float32: twice the 53.333"
    f" GFLOP/s of Linpack in float64 on all eight cores ({_TOP500}). Memory: 20 GB/s is an assumption, 60 % of the peak"
    " of 64 bits of LPDDR4X at 4267 MT/s. Power: 11.5 W with all cores busy (the same Linpack run); 3 W idle is an"
    f" assumption. The NPU is not counted.{_GIGABIT}"
)
_N100_DESCRIPTION = (
    "Mini-PC with Intel N100: four cores at up to 3.4 GHz, 8 GB. 74.4 GFLOP/s in float32: twice the 37.224 GFLOP/s of"
    f" Linpack in float64 on a Radxa X4, whose cooling allows about 2 GHz ({_TOP500} and issue 38). Memory: 20 GB/s is"
    " an assumption, half of the peak of 64 bits of DDR5 at 4800 MT/s. Power: 16 W with four cores busy (the same"
    f" Linpack run); 7 W idle is an assumption.{_GIGABIT}"
)
# Rates of the Jetson Orin Nano:
# - CPU: its peak in float32 is 16 FLOP per cycle x 6 cores x 1.7 GHz = 163 GFLOP/s. Linpack reaches 39 % of the peak on
#   a Raspberry Pi 5 (60.5 of 153.6 GFLOP/s), and 39 % of 163 GFLOP/s is 64 GFLOP/s.
# - GPU: YOLO11s (21.5 GFLOP) takes 13.91 ms, which is 1546 GFLOP/s.
_ORIN_NANO_DESCRIPTION = (
    "NVIDIA Jetson Orin Nano Super: six Cortex-A78AE at 1.7 GHz and an Ampere GPU, 8 GB. Rates: 64 GFLOP/s for the CPU"
    " are an assumption, the share of its peak that Linpack reaches on a Raspberry Pi 5; 1546 GFLOP/s for the GPU is"
    " YOLO11s in onnxruntime at 13.91 ms (Ultralytics' guide for NVIDIA Jetson). Memory: 102 GB/s for both devices, the"
    " peak of 128 bits of LPDDR5 (NVIDIA's data sheet). Power: 25 W, the largest power mode of the module (the same"
    f" data sheet), shared as 8 W for the CPU and 17 W for the GPU, and 2 W idle for each: assumptions.{_GIGABIT}"
)
# Jetson Xavier NX, from Table II of the AutoDiCE paper:
# - Rates: ResNet-101 (15.7 GFLOP) runs at 5.786 images/s on six cores (91 GFLOP/s) and at 21.767 images/s on the GPU
#   (342 GFLOP/s).
# - Active power: energy per image times images/s is the power of the whole board. It is at most 10.7 W with the CPU
#   (VGG-19) and 22.4 W with the GPU (ResNet-101). The idle power of the other device, 2 W, is subtracted.
_NX_DESCRIPTION = (
    "NVIDIA Jetson Xavier NX: six Carmel cores and a Volta GPU on a gigabit switch (AutoDiCE, section V). Rates: those"
    " of ResNet-101 in its Table II, 91 GFLOP/s (six cores) and 342 GFLOP/s (GPU, with a theoretical maximum of"
    " 844.8). Active power: from the same table, 10.7 W and 22.4 W for the board. Idle power: 2 W for each device is"
    " an assumption. Memory: 8 GB, the smaller of the two modules on sale (NVIDIA's data sheet; the paper's boards had"
    " 16 GB); 51.2 GB/s for both devices, the peak of 128 bits of LPDDR4x at 1600 MHz (the same data sheet)."
)


@dataclass(frozen=True)
class BuiltinBoard:
    """Type of board. A built-in platform consists of several boards of one type.

    Attributes:
        name: Start of the names of the platforms with this board: "rpi4x" for "rpi4x2", which has two boards.
        description: Hardware of the board, with the source of each rate, size and power.
        prefix: Start of the names of the hosts: "pi" for "pi01".
        host: One board with its memory. Its name is empty, because each host of a platform gets its own name.
        devices: Devices of one board. Each name is a suffix that is appended to the host's name, such as "_gpu".
        network: Network between the boards.
    """

    name: str
    description: str
    prefix: str
    host: Host
    devices: tuple[Device, ...]
    network: Network


def _microcontroller(
    name: str, prefix: str, ram: int, flash: int, clock_hz: float, cycles_per_multiply_add: float, description: str
) -> BuiltinBoard:
    rate_and_network = (
        f" Rate: {cycles_per_multiply_add:g} cycles per multiply-add are an assumption; a profile of your own boards is"
        " better. Network: serial links at 1 Mbaud with 8 data bits of 10 (an assumption)."
    )
    device = Device("", "", 2 * clock_hz / cycles_per_multiply_add)
    host = Host("", ram + flash, flash=flash)
    return BuiltinBoard(name, description + rate_and_network, prefix, host, (device,), Network("switch", 0.8e6))


_MICROCONTROLLERS = (
    _microcontroller(
        "nano33x", "nano", 256 * KIB, 1 * MIB, 64e6, 10,
        "Arduino Nano 33 BLE: Cortex-M4F at 64 MHz, 256 KB RAM, 1 MB flash (Nordic's product specification of the"
        " nRF52840).",
    ),
    _microcontroller(
        "stm32f746x", "f746-", 320 * KIB, 1 * MIB, 216e6, 5,
        "STM32F746: Cortex-M7 at 216 MHz, 320 KB RAM (SRAM1 240, SRAM2 16, DTCM 64, contiguous), 1 MB flash (ST's"
        " data sheet and RM0385).",
    ),
    _microcontroller(
        "stm32h743x", "h743-", 512 * KIB, 2 * MIB, 480e6, 5,
        "STM32H743: Cortex-M7 at 480 MHz, 2 MB flash, 1 MB RAM, of which the largest piece is used, 512 KB of AXI"
        " SRAM (ST's data sheet and RM0433).",
    ),
    _microcontroller(
        "esp32s3x", "esp", 512 * KIB, 8 * MIB, 240e6, 10,
        "ESP32-S3: two Xtensa LX7 at 240 MHz, of which one is used, 512 KB SRAM (Espressif's data sheet), 8 MB external"
        " flash (module ESP32-S3-WROOM-1-N8).",
    ),
    _microcontroller(
        "rp2040x", "pico", 264 * KIB, 2 * MIB, 133e6, 100,
        "RP2040: two Cortex-M0+ at 133 MHz without floating point, of which one is used, 264 KB SRAM (Raspberry Pi's"
        " data sheet), 2 MB external flash (Raspberry Pi Pico).",
    ),
)  # fmt: skip
_PI3_NCNN_RATES = (
    EngineRate("ncnn", "Conv3x3", 11.3e9), EngineRate("ncnn", "Conv", 12e9), EngineRate("ncnn", "GroupConv", 0.6e9),
)  # fmt: skip
_PI4_NCNN_RATES = (
    EngineRate("ncnn", "Conv3x3", 48.7e9), EngineRate("ncnn", "Conv1x1", 16.5e9), EngineRate("ncnn", "Conv", 17e9),
    EngineRate("ncnn", "GroupConv", 1.2e9),
)  # fmt: skip
_GATEWAY_NETWORK = Network("gateway", 100e6)
_PI3_DEVICES = (
    Device(
        "", "", 3.75e9, cores=4, power_active=3.7, power_idle=1.4, memory_bandwidth=2e9, engine_rates=_PI3_NCNN_RATES
    ),
)
_PI4_DEVICES = (
    Device(
        "", "", 13.6e9, cores=4, power_active=6.4, power_idle=2.7, memory_bandwidth=4.84e9, engine_rates=_PI4_NCNN_RATES
    ),
)
_NX_DEVICES = (
    Device("_cpu", "", 91e9, cores=6, power_active=8.7, power_idle=2.0, memory_bandwidth=51.2e9),
    Device("_gpu", "", 342e9, cores=1, power_active=20.4, power_idle=2.0, gpu=True, memory_bandwidth=51.2e9),
)
_GIGABIT_SWITCH = Network("switch", 941e6, 0.1e-3)
_PI5_NCNN_RATES = (EngineRate("ncnn", "Conv", 126e9),)
_PI5_DEVICES = (
    Device(
        "", "", 60.5e9, cores=4, power_active=11.0, power_idle=4.0, memory_bandwidth=10e9, engine_rates=_PI5_NCNN_RATES
    ),
)
_OPI5_DEVICES = (Device("", "", 107e9, cores=8, power_active=11.5, power_idle=3.0, memory_bandwidth=20e9),)
_N100_DEVICES = (Device("", "", 74.4e9, cores=4, power_active=16.0, power_idle=7.0, memory_bandwidth=20e9),)
_ORIN_DEVICES = (
    Device("_cpu", "", 64e9, cores=6, power_active=8.0, power_idle=2.0, memory_bandwidth=102e9),
    Device("_gpu", "", 1546e9, cores=1, power_active=17.0, power_idle=2.0, gpu=True, memory_bandwidth=102e9),
)

BOARDS = (
    BuiltinBoard("rpi5x", _PI5_DESCRIPTION, "pi", Host("", 8 * GIB), _PI5_DEVICES, _GIGABIT_SWITCH),
    BuiltinBoard("rpi4x", _PI4_DESCRIPTION + _GIGABIT, "pi", Host("", 4 * GIB), _PI4_DEVICES, _GIGABIT_SWITCH),
    BuiltinBoard("orangepi5x", _ORANGE_PI5_DESCRIPTION, "opi", Host("", 8 * GIB), _OPI5_DEVICES, _GIGABIT_SWITCH),
    BuiltinBoard("n100x", _N100_DESCRIPTION, "pc", Host("", 8 * GIB), _N100_DEVICES, _GIGABIT_SWITCH),
    BuiltinBoard("orin-nano-x", _ORIN_NANO_DESCRIPTION, "orin", Host("", 8 * GIB), _ORIN_DEVICES, _GIGABIT_SWITCH),
    # Clusters of the experiments in two papers: CoopAI (Raspberry Pis with a gateway) and AutoDiCE (Jetson Xavier NX).
    BuiltinBoard("rpi3-gateway-x", _PI3_DESCRIPTION, "pi", Host("", 1 * GIB), _PI3_DEVICES, _GATEWAY_NETWORK),
    BuiltinBoard(
        "rpi4-gateway-x", _PI4_DESCRIPTION + _GATEWAY, "pi", Host("", 4 * GIB), _PI4_DEVICES, _GATEWAY_NETWORK
    ),
    BuiltinBoard("jetson-nx", _NX_DESCRIPTION, "nx", Host("", 8 * GIB), _NX_DEVICES, Network("switch", 1e9)),
    *_MICROCONTROLLERS,
)
