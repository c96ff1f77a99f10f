"""Completion of names in a shell."""

from __future__ import annotations

import pytest
from support.commands import command


def complete(line: str) -> list[str]:
    """Return the words that bash offers for the last word of a command line."""
    words = line.split(" ")
    done = command(COMP_WORDS=line, COMP_CWORD=str(len(words) - 1), _DICOMPILER_COMPLETE="bash_complete")
    assert (done.returncode, done.stderr) == (0, "")
    return [text.partition(",")[2] for text in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("dicompiler comp", {"compile", "compare"}),
        ("dicompiler compile --strategy pipe", {"pipeline"}),
        ("dicompiler compile model.onnx --target so", {"sockets"}),
        ("dicompiler plan --cost roof", {"roofline"}),
        ("dicompiler simulate --strategy modn", {"modnn"}),
        ("dicompiler explore --strategy gene", {"genetic"}),
        ("dicompiler compare --strategies single,modn", {"single,modnn"}),
        ("dicompiler report --strategies dp,modn", {"dp,modnn"}),
        ("dicompiler opt -p infer-shapes,form", {"infer-shapes,form-layers"}),
        ("dicompiler compile --platform rpi4x", {f"rpi4x{count}" for count in (1, 2, 3, 4, 8)}),
        ("dicompiler demo --network resnet5", {"resnet50"}),
        ("dicompiler list pl", {"platforms", "plugins"}),
        ("dicompiler list targets m", {"mpi"}),
        ("dicompiler list platforms rpi4x2", {"rpi4x2"}),
    ],
)
def test_names_are_completed(line: str, offered: set[str]) -> None:
    assert set(complete(line)) == offered


def test_unknown_platform_is_completed_as_a_file() -> None:
    done = command(COMP_WORDS="dicompiler compile --platform my", COMP_CWORD="3", _DICOMPILER_COMPLETE="bash_complete")
    assert (done.returncode, done.stdout) == (0, "file,my\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_each_shell_is_printed(shell: str) -> None:
    done = command(_DICOMPILER_COMPLETE=f"{shell}_source")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_DICOMPILER_COMPLETE={shell}_complete" in done.stdout
