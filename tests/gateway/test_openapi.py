"""The OpenAPI document says what the server does."""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema

from tests.support.gateway_world import MODEL


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def validator(document: dict, schema: dict) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema | {"components": document["components"]})


async def test_every_reference_leads_somewhere(world):
    document = (await world.client.get("/openapi.json")).json()
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_every_documented_route_exists_and_every_parameter_is_described(world):
    document = (await world.client.get("/openapi.json")).json()
    assert len(document["paths"]) > 15
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            names = re.findall(r"\{(\w+)\}", path)
            assert [parameter["name"] for parameter in operation.get("parameters", [])] == names
            reply = await world.client.request(method.upper(), re.sub(r"\{\w+\}", "x", path))
            assert reply.status_code != 405
            if reply.status_code == 404:
                assert "nothing at" not in reply.json()["error"]["message"]


async def test_requests_and_answers_fit_their_schemas(world):
    document = (await world.client.get("/openapi.json")).json()
    requests = {
        "/v1/completions": {"model": MODEL, "prompt": [1, 2], "logprobs": None, "stop": ["x"]},
        "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "n": 2},
        "/generate": {"text": ["hi"], "sampling_params": {"temperature": 0}},
        "/v1/messages": {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [104]},
    }
    for path, body in requests.items():
        operation = document["paths"][path]["post"]
        validator(document, operation["requestBody"]["content"]["application/json"]["schema"]).validate(body)
        reply = await world.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
        validator(document, answer).validate(reply.json())
        refused = await world.client.post(path, json={"model": 5, "tokens": 5})
        error = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
        validator(document, error).validate(refused.json())


async def test_the_schemas_know_the_limits(world):
    schemas = (await world.client.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest"):
        properties = schemas[name]["properties"]
        limits = properties["top_p"]["anyOf"][0]
        assert (limits["exclusiveMinimum"], limits["maximum"]) == (0, 1)
        assert {"model"} <= set(schemas[name]["required"])


async def test_the_page_for_people_needs_nothing_from_elsewhere(world):
    page = await world.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "http" not in page.text
