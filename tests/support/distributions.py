"""Installed distributions with entry points in a directory, and the command line that finds them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def distribution(site: Path, name: str, version: str, points: dict[str, str]) -> None:
    """Write the metadata of an installed distribution to `site`; `points` maps names of entry points to modules."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{point} = {module}" for point, module in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[dicompiler]", *lines, ""]))


def command(site: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that finds the distributions in `site`."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "dicompiler", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path]), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def listed(site: Path, kind: str, **env: str) -> dict[str, dict[str, Any]]:
    """Return the records of `list KIND --json` by name, and check that nothing is printed on stderr."""
    done = command(site, "list", kind, "--json", **env)
    assert (done.returncode, done.stderr) == (0, "")
    return {record["name"]: record for record in json.loads(done.stdout)}
