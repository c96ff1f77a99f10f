"""What lies at a path where something else was looked for, in words: an artifact in place of a model, say."""

from __future__ import annotations

from pathlib import Path

_MARKER_FILES = {
    "artifact.json": "it is an artifact of 'dicompiler compile'{part}: 'dicompiler run {path}' runs it",
    "front.json": "it is a front of 'dicompiler explore': take one of the artifacts or plans in it",
    "profile_run.py": "it is a package of 'dicompiler profile': run its profile_run.py on the device",
}


def describe_wrong_path(path: str | Path, part: str = "") -> str:
    """ ": it is an artifact …, whose model is …" of what is there and of our making, or is part of such; '' else. part:
    the file in an artifact that may have been meant."""
    place = Path(path)
    for name, text in _MARKER_FILES.items():
        if (place / name).is_file():
            meant = f" (its own is {place / part})" if part and (place / part).is_file() else ""
            return ": " + text.format(path=place, part=meant)
    for parent in place.parents[:2]:
        if (parent / "artifact.json").is_file():
            return f": it is part of the artifact {str(parent)!r}: give that"
    return ""
