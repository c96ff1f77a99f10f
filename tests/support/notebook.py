"""Run the cells of the example notebook and insert their outputs: `python tests/support/notebook.py`.

The same notebook gives the same bytes each time.
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


def update(text: str, directory: Path) -> str:
    """Return the notebook's text with current outputs; all cells run in one namespace, in `directory`."""
    document = json.loads(text)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(directory):
        for number, cell in enumerate((c for c in document["cells"] if c["cell_type"] == "code"), 1):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
            lines = printed.getvalue().splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
            cell["execution_count"] = number
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    with tempfile.TemporaryDirectory() as temporary:
        NOTEBOOK.write_text(update(NOTEBOOK.read_text(encoding="utf-8"), Path(temporary)), encoding="utf-8")
