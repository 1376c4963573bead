"""The OpenAPI document, made from the types that decode and encode: it cannot say anything else than the server does."""

import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import msgspec
from starlette.types import ASGIApp

from services.gateway.errors import ErrorBody

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One route: how it is served, and what there is to know about it."""

    method: str
    path: str
    app: ASGIApp
    summary: str
    request: Any = None
    """Type of the body; None for none."""
    answer: Any = None
    """Type of the answer; None for text."""
    event: Any = None
    """Type of the events where the answer can be a stream."""
    error: Any = ErrorBody
    """Type of answers that are not 2xx."""
    needs_key: bool = True


def openapi_document(endpoints: Sequence[Endpoint], *, model: str, has_keys: bool) -> dict[str, Any]:
    """An OpenAPI 3.1 document of all endpoints, for the served `model`."""
    types: list[Any] = []
    for endpoint in endpoints:
        kinds = (endpoint.request, endpoint.answer, endpoint.event, endpoint.error)
        types += [kind for kind in kinds if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    for endpoint in endpoints:
        if endpoint.request is not None:
            _name_model(components[endpoint.request.__name__]["properties"], model)
    schema_of = _Lookup(types, schemas)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of, has_keys)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "radixmesh", "version": metadata.version("radixmesh")},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _name_model(properties: dict[str, Any], model: str) -> None:
    """Which models there are is known: the one."""
    if "model" in properties:
        optional = "default" in properties["model"]
        properties["model"] = {"enum": [model, None], "default": None} if optional else {"enum": [model]}


class _Lookup:
    """The schema of a type; types need not be hashable."""

    def __init__(self, types: Sequence[Any], schemas: Sequence[Mapping[str, Any]]) -> None:
        self._pairs = list(zip(types, schemas, strict=True))

    def __call__(self, kind: Any) -> Mapping[str, Any]:
        return next(schema for known, schema in self._pairs if known == kind)


def _operation(endpoint: Endpoint, schema_of: _Lookup, has_keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.answer is not None:
        content["application/json"] = {"schema": schema_of(endpoint.answer)}
    else:
        content["text/plain"] = {"schema": {"type": "string"}}
    if endpoint.event is not None:
        # As OpenAPI 3.2 describes it: the schema is that of one event, whose data is text that holds JSON.
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema_of(endpoint.event)}
        properties = {"data": data, "event": {"type": "string"}}
        content["text/event-stream"] = {"schema": {"type": "object", "properties": properties}}
    error = {"description": "Error", "content": {"application/json": {"schema": schema_of(endpoint.error)}}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', endpoint.path).rstrip('_')}",
        "responses": {
            "200": {"description": "OK", "content": content},
            "4XX": error,
            "503": error | {"headers": {"Retry-After": {"schema": {"type": "integer"}}}},
            "504": error,
        },
    }
    if names := _PARAMETER.findall(endpoint.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.request is not None:
        body = {"application/json": {"schema": schema_of(endpoint.request)}}
        operation["requestBody"] = {"required": True, "content": body}
    if has_keys and endpoint.needs_key:
        operation["security"] = [{"key": []}]
    return operation


DOCS_PAGE = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>radixmesh API</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
summary { cursor: pointer; padding: .3rem 0 } code, pre { font: 13px/1.45 ui-monospace, monospace }
pre { background: #f5f5f5; padding: .8rem; overflow: auto; border-radius: 4px }
.method { display: inline-block; width: 4.5rem; font-weight: 600 } .note { color: #666 }
</style></head><body><h1>radixmesh API</h1>
<p class="note">From <a href="openapi.json">openapi.json</a>, which other tools read too.</p><main></main><script>
fetch("openapi.json").then(answer => answer.json()).then(doc => {
  const main = document.querySelector("main");
  const add = (parent, tag, text, kind) => {
    const element = parent.appendChild(document.createElement(tag));
    if (text) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };
  const resolve = schema => schema.$ref ? doc.components.schemas[schema.$ref.split("/").pop()] : schema;
  for (const [path, methods] of Object.entries(doc.paths)) for (const [method, operation] of Object.entries(methods)) {
    const details = add(main, "details"), summary = add(details, "summary");
    add(summary, "span", method.toUpperCase(), "method"); add(summary, "code", path + "  ");
    add(summary, "span", operation.summary, "note");
    const show = (title, content) => { for (const [type, body] of Object.entries(content || {})) {
      add(details, "p", title + " (" + type + ")"); add(details, "pre", JSON.stringify(resolve(body.schema), null, 2));
    } };
    show("Request", operation.requestBody && operation.requestBody.content);
    show("Answer", operation.responses["200"].content);
  }
  add(main, "h2", "Types");
  for (const [name, schema] of Object.entries(doc.components.schemas)) {
    const details = add(main, "details"); add(details, "summary", name);
    add(details, "pre", JSON.stringify(schema, null, 2));
  }
});
</script></body></html>
"""
