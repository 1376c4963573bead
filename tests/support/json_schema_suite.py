"""The JSON Schema Test Suite (draft 2020-12) against the grammar service: each schema is enforced exactly, or refused.

`python -m tests.support.json_schema_suite` prints the table of `docs/grammar.md`: what becomes of the schemas of each keyword, and
every difference with its reason; with `--refusals`, also why each refused schema is refused.
"""

import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.grammar.config import GrammarConfig
from services.grammar.vetting import Task, Vetter, make_vetter
from shared.messages.constraints import ConstraintRefused, JsonSchema
from tests.support.grammars import Accepts, answer, language_of, write_byte_level_model

SUITE = Path(__file__).parents[3] / "shared" / "data" / "json-schema-test-suite"

ORDER = "members stand in another order than the schema names them"
WHOLE_FLOAT = "a whole number is written with a fraction (1.0)"
FORMAT = "`format` is asserted here, an annotation in the suite"
UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Difference:
    """An instance on which grammar and suite disagree."""

    keyword: str
    case: str
    test: str
    is_valid: bool
    reason: str


@dataclass(slots=True)
class Outcome:
    """What became of the schemas in one file of the suite."""

    keyword: str
    num_enforced: int = 0
    num_instances: int = 0
    refusals: list[tuple[str, str]] = field(default_factory=list)
    """(case, message)"""
    differences: list[Difference] = field(default_factory=list)


def run_suite(vetter: Vetter, folder: Path = SUITE) -> list[Outcome]:
    return [_run_file(vetter, path) for path in sorted(folder.glob("*.json"))]


def _run_file(vetter: Vetter, path: Path) -> Outcome:
    outcome = Outcome(path.stem)
    cases = json.loads(path.read_text(encoding="utf-8"))
    for case in cases if isinstance(cases, list) else []:
        reply = answer(vetter, JsonSchema(schema=case["schema"]))
        if isinstance(reply, ConstraintRefused):
            outcome.refusals.append((case["description"], reply.message))
            continue
        outcome.num_enforced += 1
        accepts = language_of(vetter.tokenizer, reply.grammar)
        for test in case["tests"]:
            outcome.num_instances += 1
            if accepts(_written(test["data"])) != test["valid"]:
                reason = _reason(accepts, case["schema"], test["data"]) if test["valid"] else UNEXPLAINED
                outcome.differences.append(
                    Difference(path.stem, case["description"], test["description"], test["valid"], reason)
                )
    return outcome


def _written(instance: Any) -> str:
    """As the service writes JSON by default."""
    return json.dumps(instance, ensure_ascii=False)


def _reason(accepts: Accepts, schema: Any, instance: Any) -> str:
    if any(accepts(_written(other)) for other in itertools.islice(_orders(instance), 5000)):
        return ORDER
    if accepts(_written(_with_whole_numbers(instance))):
        return WHOLE_FLOAT
    return FORMAT if '"format"' in json.dumps(schema) else UNEXPLAINED


def _orders(instance: Any) -> Iterator[Any]:
    """The same value with the members of its objects in any order."""
    if isinstance(instance, dict):
        for members in itertools.permutations(instance.items()):
            for values in itertools.product(*(list(_orders(value)) for _, value in members)):
                yield dict(zip((name for name, _ in members), values, strict=True))
    elif isinstance(instance, list):
        yield from (list(items) for items in itertools.product(*(list(_orders(item)) for item in instance)))
    else:
        yield instance


def _with_whole_numbers(instance: Any) -> Any:
    match instance:
        case float() if instance.is_integer():
            return int(instance)
        case list():
            return [_with_whole_numbers(item) for item in instance]
        case dict():
            return {name: _with_whole_numbers(value) for name, value in instance.items()}
        case _:
            return instance


def table(outcomes: list[Outcome]) -> str:
    """In Markdown."""
    lines = [
        "| keyword | schemas | enforced | refused | instances checked | differences |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for o in outcomes:
        num_refused = len(o.refusals)
        row = (o.num_enforced + num_refused, o.num_enforced, num_refused, o.num_instances, len(o.differences))
        lines.append(f"| `{o.keyword}` | " + " | ".join(map(str, row)) + " |")
    total = Counter[str]()
    for o in outcomes:
        total.update(enforced=o.num_enforced, refused=len(o.refusals), instances=o.num_instances)
        total.update(differences=len(o.differences))
    lines.append(
        f"| all | {total['enforced'] + total['refused']} | {total['enforced']} | {total['refused']} "
        f"| {total['instances']} | {total['differences']} |"
    )
    lines += ["", "| keyword | case | instance | reason |", "|---|---|---|---|"]
    lines += [f"| `{d.keyword}` | {d.case} | {d.test} | {d.reason} |" for o in outcomes for d in o.differences]
    return "\n".join(lines)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        write_byte_level_model(Path(folder))
        task = Task(model_path=folder, tool_format="hermes", limits=GrammarConfig().limits)
        outcomes = run_suite(make_vetter(task))
    print(table(outcomes))
    if "--refusals" in sys.argv:
        print(*(f"{o.keyword}: {case}: {message}" for o in outcomes for case, message in o.refusals), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
