"""Generate docs/reference/commands.md and docs/reference/plugins.md: `python tests/support/command_reference.py`.

click commands, `dicompiler list KIND --json` ⇒ Markdown pages
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from dicompiler.cli.command_line import COMMANDS, root

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
COMMANDS_PAGE = REFERENCE / "commands.md"
PLUGINS_PAGE = REFERENCE / "plugins.md"
MODULE_PAGES = (REFERENCE / "python.md", REFERENCE / "plugin-api" / "index.md")
MODULE_ROW = re.compile(r"^(\| \[?`(dicompiler[\w.]*)`\S* \| ).*( \|)$", re.MULTILINE)
COMMAND_GROUPS = (
    ("Compile and decide", ("compile", "plan", "compare", "explore", "simulate", "opt")),
    ("Run and verify", ("run", "verify", "emulate", "deploy", "status", "keys", "report", "demo")),
    ("Measure", ("profile", "calibrate", "tune", "platform")),
    ("Look up", ("list",)),
)
PLUGIN_KINDS = (
    ("strategies", "Strategies", "--strategy 'NAME{option=value …}'"),
    ("passes", "Passes", "dicompiler opt -p 'NAME{option=value …},NAME'"),
    ("targets", "Targets", "--target 'NAME{option=value …}'"),
    ("engines", "Engines", "--engine NAME"),
    ("cost-models", "Cost models", "--cost 'NAME{option=value …}'"),
)
EXIT_CODES = """## Exit codes

| code | meaning |
|---|---|
| 0 | success |
| 1 | a file is missing or invalid or cannot be written, the model cannot be compiled, or a run or a check fails |
| 2 | an argument is wrong: an unknown or missing option, an unknown name, an invalid value, or a contradiction |
| 70 | an internal error |
| 129, 143 | ended by SIGHUP or SIGTERM |
| 130 | interrupted by Ctrl-C; during a search, Ctrl-C ends only the search, and the command goes on |

Code 1 means that a file must change, and code 2 that the command must change. For example, `--platform nope` ends with
code 2, because there is no such built-in platform. `--platform nope.toml` ends with code 1, because only the file is
missing. Contradictions are, for example, two options with the same file, or a `--shape` that the model cannot have. An
unknown name in `DICOMPILER_PLUGINS` ends with code 2 too.

Results go to stdout, diagnostics to stderr. All commands have these options:

| option | meaning |
|---|---|
| `--quiet` | Print only errors, and output that an option such as --json asks for. |
| `--log-file FILE` | Append the steps of the command, warnings and errors, with time and process id, to this file. |
| `--debug` | Print a traceback with every error. |

With `--json`, an error is also a [document on stdout](formats/json-output.md).
[Shells can complete](../use/shell-completion.md) commands, options and names.

## Environment variables

| variable | meaning |
|---|---|
| `DICOMPILER_PLUGINS` | the third-party plugins to load, separated by commas; empty: none |
| `DICOMPILER_TOKEN` | the token of a run without keys, for devices that you start by hand |
| `ORT_DISABLE_TELEMETRY` | set to 1 by dicompiler unless you set it |
"""


def make_commands_page() -> str:
    """Return the page with all commands and their options."""
    intro = "# Command line\n\nOption `--help` of each command prints these texts too.\n"
    return "\n".join([intro, *_command_index(), *_command_sections(), EXIT_CODES])


def _command_index() -> Iterator[str]:
    assert sorted(name for _, names in COMMAND_GROUPS for name in names) == sorted(COMMANDS)
    yield "| command | purpose |"
    yield "|---|---|"
    for _, names in COMMAND_GROUPS:
        for name in names:
            yield f"| [`{name}`](#{name}) | {COMMANDS[name].rstrip('.')} |"
    yield ""


def _command_sections() -> Iterator[str]:
    for title, names in COMMAND_GROUPS:
        yield f"## {title}\n"
        for name in names:
            yield _command_section(name)


def _command_section(name: str) -> str:
    context = click.Context(root, info_name="dicompiler")
    command = root.get_command(context, name)
    assert command is not None
    own_context = click.Context(command, info_name=name, parent=context)
    usage = " ".join(command.collect_usage_pieces(own_context))
    options = [param for param in command.get_params(own_context) if isinstance(param, click.Option)]
    records = [option.get_help_record(own_context) for option in options]
    rows = [f"| {_code(left)} | {_cell(right)} |" for left, right in filter(None, records)]
    text = (command.help or "").replace("\b", "").strip()
    paragraphs = [_paragraph(" ".join(paragraph.split())) for paragraph in text.split("\n\n")]
    table = "\n".join(["| option | meaning |", "|---|---|", *rows])
    return f"### {name}\n\n    dicompiler {name} {usage}\n\n" + "\n\n".join(paragraphs) + f"\n\n{table}\n"


def _paragraph(text: str) -> str:
    example = text.removeprefix("Example: ")
    return text if example == text else f"Example:\n\n    {example}"


def make_plugins_page() -> str:
    """Return the page with the options of all built-in strategies, passes, targets and cost models."""
    parts = [
        "# Strategies, passes, targets and cost models\n\nThis page lists the built-in strategies, passes, targets,"
        " engines and cost models. Installed plugins can add more. Give options in braces, and"
        " separate the values of a list by commas:"
        " `'tile-height{layers=conv1,conv2 parts=4}'`. `dicompiler list KIND NAME` prints the same.\n"
    ]
    for kind, title, usage in PLUGIN_KINDS:
        parts.append(f"## {title}\n\n    {usage}\n")
        parts += [_plugin_section(record) for record in _list(kind)]
    return "\n".join(parts)


def _plugin_section(record: dict[str, Any]) -> str:
    rows = [
        f"| `{option['name']}` | {_code(option['type'])} | {_default(option['default'])} | {_cell(option['help'])} |"
        for option in record["options"]
    ]
    table = "\n".join(["", "| option | type | default | meaning |", "|---|---|---|---|", *rows, ""]) if rows else ""
    return f"### {record['name']}\n\n{record['summary']}\n{table}"


def update_modules(text: str) -> str:
    """Return a page's text with the current summaries of the modules in its table."""

    def replace_row(match: re.Match[str]) -> str:
        summary = (inspect.getdoc(import_module(match[2])) or "").split("\n\n")[0].replace("\n", " ")
        return match[1] + summary + match[3]

    return MODULE_ROW.sub(replace_row, text)


def _list(kind: str) -> list[dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DICOMPILER_PLUGINS": ""}
    command = [sys.executable, "-m", "dicompiler", "list", kind, "--json"]
    records: list[dict[str, Any]] = json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
    return records


def _default(default: str | None) -> str:
    if default is None:
        return "required"
    return _code(default) if default else ""


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


if __name__ == "__main__":
    COMMANDS_PAGE.write_text(make_commands_page(), encoding="utf-8")
    PLUGINS_PAGE.write_text(make_plugins_page(), encoding="utf-8")
    for module_page in MODULE_PAGES:
        module_page.write_text(update_modules(module_page.read_text(encoding="utf-8")), encoding="utf-8")
