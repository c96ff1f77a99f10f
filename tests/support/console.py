"""Insert the output of commands into README.md and the pages of docs/ that show commands: `python
tests/support/console.py`.

    pages, an empty directory ⇒ pages with the current output of their commands
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "README.md"
DOCS = DOCUMENT.parent / "docs"
GUIDES = tuple(DOCS / "use" / name for name in ("strategies.md", "report.md", "manual-plans.md"))
"""Pages whose commands continue in the directory in which the README's commands ran, in this order."""
TUTORIAL = DOCS / "start" / "tutorial.md"
EXPORTED = Path(__file__).parents[1] / "fixtures" / "torch" / "tutorial.onnx"
"""What the tutorial's `export.py` writes; fixtures/torch/make.py ran it."""
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
PROGRAMS: Mapping[str, Sequence[str]] = {
    "dicompiler": [sys.executable, "-m", "dicompiler"],
    "python": [sys.executable],
}


@dataclass(frozen=True)
class Shown:
    """A command line in a document, and the output below it; "" if the document omits the output."""

    line: str
    output: str


def shown(text: str) -> tuple[Shown, ...]:
    """Return all commands of the document in order."""
    return tuple(command for block in BLOCK.findall(text) for command in _commands(block))


def _commands(block: str) -> Iterator[Shown]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield Shown(line, output)


def run(line: str, directory: Path, installed: Mapping[str, Sequence[str]] | None = None) -> str:
    """Run a command line and return its stderr followed by its stdout; raise CalledProcessError if it fails.

    `installed` are the programs of an installation, by name. By default, the programs of this checkout run.
    """
    first, *rest = shlex.split(line)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if installed is None:
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [*(installed or PROGRAMS)[first], *rest],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stderr + done.stdout


def run_python(code: str, directory: Path) -> str:
    """Run a document's Python program and return its stdout; raise CalledProcessError if it fails."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=directory, env=env, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def written(text: str, directory: Path) -> str:
    """Return the document with the current output of each command whose output it shows."""

    def block(match: re.Match[str]) -> str:
        lines = []
        for one in _commands(match[1]):
            output = run(one.line, directory) if one.line.split()[1] != "deploy" else ""
            lines.append(f"$ {one.line}\n{output if one.output else ''}")
        return f"```console\n{''.join(lines)}```"

    return BLOCK.sub(block, text)


def blocks(text: str, language: str) -> list[str]:
    """Return the content of the document's fenced code blocks in one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def tutorial_files(text: str, directory: Path) -> None:
    """Write the files that the tutorial's reader has before its first command: camera.onnx and cluster.toml."""
    shutil.copy(EXPORTED, directory / "camera.onnx")
    (directory / "cluster.toml").write_text(blocks(text, "toml")[0])


def main() -> None:
    """Update all pages."""
    for documents in ((DOCUMENT, *GUIDES), (TUTORIAL,)):
        with tempfile.TemporaryDirectory() as temporary:
            for document in documents:
                text = document.read_text(encoding="utf-8")
                if document == TUTORIAL:
                    tutorial_files(text, Path(temporary))
                document.write_text(written(text, Path(temporary)), encoding="utf-8")


if __name__ == "__main__":
    main()
