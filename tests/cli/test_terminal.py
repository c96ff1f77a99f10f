"""Tables on a terminal of 80 columns: no line is wider, no word or number is broken or cut off."""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from support.command_lines import LINES
from support.console import DOCUMENT
from support.terminal import run_on_terminal

from dicompiler.base.units import format_number
from dicompiler.cli import main
from dicompiler.cli.deploy import _show_installed
from dicompiler.cli.status import _show_statuses
from dicompiler.cli.table import print_table
from dicompiler.target.run_records import DeviceStatus, InstalledDevice

COLUMNS = 80
SCIENTIFIC_COMMANDS = ("verify", "demo")
"""Commands that print ratios such as 2.7e-07."""
MORE_LINES = {
    **{f"list {kind}": f"list {kind}" for kind in ("passes", "strategies", "operators", "platforms", "plugins")},
    "list an entry": "list strategies cpsat",
    "list a platform": "list platforms rpi4x4",
    "compare with energy and failures": "compare tiny.onnx --platform rpi4x4 --tolerate-failures 1"
    " --strategies single,modnn,pipeline{devices=pi04,pi03,pi02,pi01}",
    "explain": "compare tiny.onnx --platform rpi4x2 --strategies single,modnn --explain",
    "failures": "compile tiny.onnx --platform rpi4x4 --strategy modnn --tolerate-failures 1 -o tolerant",
    "microcontrollers": "compile tiny.onnx --platform nano33x2 --strategy modnn --target tflm -o small",
    "simulated failures": "simulate tiny.onnx --platform rpi4x4 --strategy modnn --tolerate-failures 1 --frames 30"
    " --fail pi02@0.05s",
}


def check_width(printed: str) -> None:
    """Check that every line wider than the terminal is a single word."""
    for line in printed.splitlines():
        assert cell_len(line) <= COLUMNS or len(line.split()) == 1, line


@pytest.mark.slow
@pytest.mark.parametrize("line", [*LINES, *MORE_LINES])
def test_output_of_a_command_fits_80_columns(line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_PARENT_PID", "1")  # Jupyter sets this variable; no progress is drawn then.
    codes = []
    with contextlib.chdir(place):
        words = (LINES | MORE_LINES)[line].split(" ")
        printed = run_on_terminal(lambda: codes.append(main(words)))
    assert codes == [0], printed
    check_width("\n".join(text for text in printed.splitlines() if not text.startswith("dicompiler: warning: ")))
    exponent = r"\de[+]\d" if line in SCIENTIFIC_COMMANDS else r"\de[+-]\d"
    assert not re.search(exponent, printed), printed


def test_tables_of_boards_fit_80_columns() -> None:
    address, path = "[2001:db8:85a3::8a2e:370:7334]:47000", "/home/pi/.cache/dicompiler/camera/jetson-orin-nx-01"
    statuses = [
        DeviceStatus(
            device=f"jetson-orin-nx-0{i}",
            address=address,
            digest="sha256:0123456789abcdef" if i else "",
            error="it does not answer within 5 s: start it again, or look at its log on the board",
        )
        for i in range(2)
    ]
    versions = {"python": "3.11.2", "onnxruntime": "1.23.2", "numpy": "2.3.4"}
    installed = [InstalledDevice("jetson-orin-nx-01", "jetson-orin-nx", path, 123456789012, versions)]
    for show, records in ((_show_statuses, statuses), (_show_installed, installed)):
        printed = run_on_terminal(lambda show=show, records=records: show(records))
        check_width(printed)
        assert address in printed or path in printed
        assert "start it again, or look at its log" in " ".join(printed.split()) or show is _show_installed


def random_table(rng: random.Random) -> tuple[list[str], list[list[str]], list[int], int | None]:
    """Return headers, rows, right-aligned columns and a text column, with unique words."""
    numbers = iter(range(100_000))

    def make_cell(most_words: int) -> str:
        words = (rng.choice("abcd日é") * rng.randint(1, 12) + str(next(numbers)) for _ in range(most_words))
        return " ".join(words)

    count = rng.randint(1, 12)
    sizes = [rng.choice((1, 1, 1, 2, 30)) for _ in range(count)]
    rows = [[make_cell(rng.randint(0, size)) for size in sizes] for _ in range(rng.randint(0, 5))]
    if rng.random() < 0.3 and rows:
        rows[0][0] = make_cell(1) * rng.randint(1, 9)
    right = [column for column in range(count) if rng.random() < 0.5]
    return [make_cell(1) for _ in range(count)], rows, right, rng.choice((None, *range(1, count)))


@pytest.mark.parametrize("seed", range(60))
def test_words_of_random_tables_stay_whole(seed: int) -> None:
    headers, rows, right, wrap = random_table(random.Random(seed))
    printed = run_on_terminal(lambda: print_table(headers, rows, right, wrap=wrap))
    check_width(printed)
    assert set(printed.split()) == {word for line in (headers, *rows) for cell in line for word in cell.split()}


def test_terminal_gets_the_columns_that_it_has_room_for() -> None:
    headers = [f"a number of {i}" for i in range(20)]
    wide = run_on_terminal(lambda: print_table(headers, [["1"] * 20]), 350)
    narrow = run_on_terminal(lambda: print_table(headers, [["1"] * 20]), 40)
    assert len(wide.splitlines()) == 2
    assert max(map(len, narrow.splitlines())) <= 40


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (4416.2, 3, "4416"),
        (123456.7, 4, "123457"),
        (0.0000125, 3, "0.0000125"),
        (280.14, 4, "280.1"),
        (-4416.2, 3, "-4416"),
        (0.0, 4, "0"),
        (float("inf"), 3, "inf"),
    ],
)
def test_numbers_have_no_exponent(value: float, digits: int, text: str) -> None:
    assert format_number(value, digits) == text


def test_commands_format_numbers_and_tables_in_one_place() -> None:
    for path in (DOCUMENT.parent / "dicompiler" / "cli").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"\.\dg\b", source), f"{path}: use format_number"
        assert "rich.table" not in source, f"{path}: use print_table"
