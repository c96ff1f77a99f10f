"""The notebook of examples/: `python tests/support/notebook.py` runs its cells and writes what they print below them.

In: the notebook. Out: the same with the output of each cell, the same bytes each time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "splitting.ipynb"


def ran(text: str, directory: Path) -> str:
    """The notebook's text with what its cells print now, all in one namespace and in that directory."""
    document = json.loads(text)
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(directory):
        for number, cell in enumerate((c for c in document["cells"] if c["cell_type"] == "code"), 1):
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)  # our own file
            lines = said.getvalue().splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
            cell["execution_count"] = number
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    with tempfile.TemporaryDirectory() as temporary:
        NOTEBOOK.write_text(ran(NOTEBOOK.read_text(encoding="utf-8"), Path(temporary)), encoding="utf-8")
