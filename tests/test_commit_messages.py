"""The form of commit messages: `area: imperative summary` and a body that says why."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Commits up to this one are older than the rules for messages, and are not checked.
LAST_UNCHECKED = "eaf963663b17ed25098946d5820c733fedde4c9e"
SUBJECT = re.compile(r"[\w./, -]+: [a-z0-9`'].*[^.]")
MAX_SUBJECT_CHARS = 72


def find_faults(subject: str, body: str) -> list[str]:
    faults = []
    if SUBJECT.fullmatch(subject) is None:
        faults.append("write 'area: imperative summary' without a period")
    if len(subject) > MAX_SUBJECT_CHARS:
        faults.append(f"shorten the summary to {MAX_SUBJECT_CHARS} characters")
    if not body.strip():
        faults.append("add a body that says why")
    return faults


@pytest.mark.parametrize(
    ("subject", "body", "fault_count"),
    [
        ("sockets: spin for 0.5 ms before blocking in poll()", "Waking an idle core costs about 50 µs.", 0),
        ("wip", "Because.", 1),
        ("Sockets spin.", "", 2),
        ("sockets: spin.", "Because.", 1),
        ("sockets: " + "spin " * 20 + "long", "Because.", 1),
    ],
)
def test_finds_faults_of_a_message(subject: str, body: str, fault_count: int) -> None:
    assert len(find_faults(subject, body)) == fault_count


def test_new_commits_have_the_form() -> None:
    """An archive of the sources has no history, and a shallow clone has only its newest commits."""
    words = ["git", "-C", str(ROOT), "log", "--no-merges", "-z", "--format=%h%n%s%n%b"]
    done = subprocess.run([*words, f"{LAST_UNCHECKED}.."], capture_output=True, text=True, check=False)
    entries = [entry.split("\n", 2) for entry in done.stdout.split("\0") if entry.strip()]
    faults = {commit: found for commit, subject, body in entries if (found := find_faults(subject, body))}
    assert not faults
