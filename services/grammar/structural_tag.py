"""Structural tags: free text in which certain markers open a part that must fit a schema.

Two forms are read. The older one lists `structures` with `begin`, `schema` and `end`, and `triggers` that begin them. The newer
one is a tree of formats: `const_string`, `json_schema`, `regex`, `any_text`, `sequence`, `or`, `tag`, `triggered_tags` and
`tags_with_separator`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.grammar.config import Limits
from services.grammar.json_schema import normalise
from services.grammar.lark import LarkGrammar, json_options, json_value, regex, sequence
from services.grammar.refusal import Refusal

_KNOWN: Final = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags, tags_with_separator"


class StructuralTagGrammar:
    """Builds the grammar of one structural tag. `schemas` and `warnings` are filled on the way, each with its place."""

    def __init__(self, limits: Limits, special_tokens: Mapping[str, int]) -> None:
        self._limits = limits
        self._lark = LarkGrammar(special_tokens)
        self._options = json_options("default")
        self.schemas: list[tuple[str, dict[str, Any]]] = []
        self.warnings: list[str] = []

    def build(self, spec: Any) -> str:
        """The Lark grammar. Raises Refusal."""
        if not isinstance(spec, dict):
            raise Refusal("a structural tag is an object")
        if "format" in spec:
            return self._lark.finish(self._format(spec["format"], "format", 0, is_last=True))
        if "structures" in spec:
            tags = [self._structure(item, f"structures[{i}]") for i, item in enumerate(_list(spec, "structures", ""))]
            return self._lark.finish(self._triggered(_strings(spec, "triggers", ""), tags, "structures"))
        raise Refusal("a structural tag has either `structures` and `triggers`, or `format`")

    def _structure(self, item: Any, where: str) -> tuple[str, str]:
        """(begin, what follows it)"""
        if not isinstance(item, dict):
            raise Refusal(f"{where} is not an object")
        begin, end = _string(item, "begin", where), _string(item, "end", where, optional=True)
        content = self._schema(item.get("schema", {}), f"{where}.schema")
        return begin, sequence(content, self._lark.marker(end))

    def _triggered(
        self,
        triggers: Sequence[str],
        tags: Sequence[tuple[str, str]],
        where: str,
        *,
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> str:
        """Free text with tags in it. A tag belongs to the one trigger that its beginning starts with."""
        for trigger in triggers:
            if any(other != trigger and other.startswith(trigger) for other in triggers):
                raise Refusal(f"the trigger {trigger!r} is the beginning of another trigger")
        followers: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for begin, rest in tags:
            starts = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not starts:
                raise Refusal(f"in {where}, {begin!r} does not begin with any of the triggers")
            trigger = starts[0]
            followers[trigger].append(sequence(self._lark.marker(begin[len(trigger) :]), rest))
        segments = [
            self._lark.rule(sequence(self._lark.text_until(trigger), f"({' | '.join(rests)})"))
            for trigger, rests in followers.items()
            if rests
        ]
        segment, text = self._lark.rule(" | ".join(segments)), self._lark.rule(self._lark.TEXT)
        if stop_after_first:
            return self._lark.rule(segment if at_least_one else f"{segment} | {text}")
        return self._lark.rule(f"{segment}{'+' if at_least_one else '*'} {text}")

    def _format(self, node: Any, where: str, depth: int, *, is_last: bool) -> str:
        """The rule for one node of the newer form; `is_last`: nothing follows it, so free text may stand here."""
        if not isinstance(node, dict):
            raise Refusal(f"{where} is not an object")
        if depth > self._limits.max_depth:
            raise Refusal(f"the structural tag is nested deeper than {self._limits.max_depth} levels")
        match node.get("type"):
            case "const_string":
                return self._lark.rule(self._lark.marker(_string(node, "value", where, optional=True)) or '""')
            case "json_schema":
                return self._lark.rule(self._schema(node.get("json_schema"), f"{where}.json_schema"))
            case "regex":
                return self._lark.rule(regex(_string(node, "pattern", where)))
            case "any_text":
                if not is_last:
                    raise Refusal(f"{where}: any_text may stand at the end or as the content of a tag")
                return self._lark.rule(self._lark.TEXT)
            case "sequence":
                elements = _list(node, "elements", where)
                rules = [
                    self._format(
                        element,
                        f"{where}.elements[{i}]",
                        depth + 1,
                        is_last=is_last and i == len(elements) - 1,
                    )
                    for i, element in enumerate(elements)
                ]
                return self._lark.rule(" ".join(rules))
            case "or":
                elements = _list(node, "elements", where)
                rules = [
                    self._format(element, f"{where}.elements[{i}]", depth + 1, is_last=is_last)
                    for i, element in enumerate(elements)
                ]
                return self._lark.rule(" | ".join(rules))
            case "tag":
                begin, rest = self._tag(node, where, depth)
                return self._lark.rule(sequence(self._lark.marker(begin), rest))
            case "triggered_tags":
                if not is_last:
                    raise Refusal(f"{where}: triggered_tags may stand at the end only")
                return self._triggered(
                    _strings(node, "triggers", where),
                    self._tags(node, where, depth),
                    where,
                    at_least_one=node.get("at_least_one") is True,
                    stop_after_first=node.get("stop_after_first") is True,
                )
            case "tags_with_separator":
                return self._separated(node, where, depth)
            case other:
                raise Refusal(f"{where}: the format {other!r} is unknown; known: {_KNOWN}")

    def _tags(self, node: dict[str, Any], where: str, depth: int) -> list[tuple[str, str]]:
        return [self._tag(tag, f"{where}.tags[{i}]", depth + 1) for i, tag in enumerate(_list(node, "tags", where))]

    def _tag(self, node: Any, where: str, depth: int) -> tuple[str, str]:
        """(begin, what follows it)"""
        if not isinstance(node, dict):
            raise Refusal(f"{where} is not an object")
        begin, end = _string(node, "begin", where), _string(node, "end", where, optional=True)
        content = node.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            return begin, self._lark.text_until(end)
        inside = self._format(content, f"{where}.content", depth + 1, is_last=not end)
        return begin, sequence(inside, self._lark.marker(end))

    def _separated(self, node: dict[str, Any], where: str, depth: int) -> str:
        tags = [sequence(self._lark.marker(begin), rest) for begin, rest in self._tags(node, where, depth)]
        tag = self._lark.rule(" | ".join(tags))
        separator = self._lark.marker(_string(node, "separator", where, optional=True))
        several = tag if node.get("stop_after_first") is True else f"{tag} ({sequence(separator, tag)})*"
        return self._lark.rule(several if node.get("at_least_one") is True else f"({several})?")

    def _schema(self, schema: Any, where: str) -> str:
        try:
            normalised, warnings = normalise(schema, self._limits)
        except Refusal as refusal:
            raise Refusal(f"{where}: {refusal.message}") from None
        self.schemas.append((where, normalised))
        self.warnings += [f"{where}: {warning}" for warning in warnings]
        return json_value(normalised, self._options)


def _string(node: dict[str, Any], key: str, where: str, *, optional: bool = False) -> str:
    value = node.get(key, "" if optional else None)
    if not isinstance(value, str) or not (value or optional):
        raise Refusal(f"{where}.{key} must be a string{'' if optional else ', not empty'}")
    return value


def _list(node: dict[str, Any], key: str, where: str) -> list[Any]:
    value = node.get(key)
    if not isinstance(value, list) or not value:
        raise Refusal(f"{where}.{key}".lstrip(".") + " must be a list, not empty")
    return value


def _strings(node: dict[str, Any], key: str, where: str) -> list[str]:
    value = _list(node, key, where)
    if not all(isinstance(item, str) and item for item in value):
        raise Refusal(f"{where}.{key}".lstrip(".") + " must be a list of strings, none of them empty")
    return list(dict.fromkeys(value))
