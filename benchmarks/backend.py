"""The one-operator models of the ONNX backend tests: compile, split and verify each.

Each model is compiled for three devices, split in every way that the rules of its operators allow, and compared with
onnxruntime. The script prints a table and the failures; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from support.backend_models import KINDS, Outcome, cases, outcome

RESULTS = ("split", "whole", "refused", "skipped")
FAILURES = ("wrong", "crash")


def _row(operator: str, found: Sequence[Outcome]) -> list[str]:
    """Return the table row of an operator.

    It has the numbers of its models that run, are split, stay whole and are refused, the number of plans, and the
    reasons why models are not split.
    """
    count = Counter(item.result for item in found)
    reasons = Counter(item.why for item in found if item.result in ("whole", "refused", *FAILURES))
    why = "; ".join(f"{text} ({number})" if len(reasons) > 1 else text for text, number in reasons.most_common(3))
    numbers = [len(found) - count["skipped"], count["split"], count["whole"], count["refused"]]
    return [operator, *(str(n) if n else "" for n in numbers), str(sum(item.plans for item in found) or ""), why]


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one row for each operator, and a row with the totals."""
    by_operator: dict[str, list[Outcome]] = defaultdict(list)
    for item in outcomes:
        if item.result != "skipped":
            by_operator[item.case.operator].append(item)
    made = Table("operator", "models", "split", "whole", "refused", "plans", "why not split", title="on 3 devices")
    for operator in sorted(by_operator):
        made.add_row(*_row(operator, by_operator[operator]))
    made.add_section()
    made.add_row(*_row("all", [item for own in by_operator.values() for item in own])[:-1], "")
    return made


@click.command()
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Only these tests (repeatable).")
@click.option("--operator", "operators", multiple=True, help="Only models of these operators (repeatable).")
@click.option("--plans", default=3, show_default=True, help="Random plans for each model.")
def main(kinds: Sequence[str], operators: Sequence[str], plans: int) -> None:
    """Compile and split every one-operator model that onnxruntime runs, and verify each."""
    import onnxruntime

    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    onnxruntime.set_default_logger_severity(4)
    outcomes = []
    for number, case in enumerate(cases(kinds or KINDS)):
        if not operators or case.operator in operators:
            outcomes.append(outcome(case, plans))
        if number % 100 == 99:
            click.echo(f"{number + 1} models", err=True)
    Console(width=None if sys.stdout.isatty() else 160).print(table(outcomes))
    skipped = Counter(item.why for item in outcomes if item.result == "skipped")
    click.echo("not counted: " + ("; ".join(f"{why}: {number}" for why, number in skipped.items()) or "none"))
    failures = [item for item in outcomes if item.result in (*FAILURES, "refused")]
    for item in failures:
        click.echo(f"{item.case.kind}/{item.case.name}: {item.result}: {item.why}")
    sys.exit(1 if any(item.result in FAILURES for item in failures) else 0)


if __name__ == "__main__":
    main()
