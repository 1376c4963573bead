"""The endpoints that do not generate, and what all endpoints have in common: ids, keys, limits, errors."""

import asyncio
import json
import re

import httpx
import msgspec
import pytest

from services.gateway.config import GatewayConfig
from shared.config import ConfigError, load_config
from tests.support.gateway_world import CONTEXT_LEN, MODEL, VOCAB_SIZE, World, eventually, gateway_world, ids


async def raw(world: World, request: bytes) -> bytes:
    """What the server answers to these bytes before it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.actor.port)
    writer.write(request)
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


def error_of(reply: httpx.Response) -> dict:
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def test_the_model_is_listed_with_its_context(world):
    listed = (await world.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    card = listed["data"][0]
    assert (card["id"], card["max_model_len"], card["object"]) == (MODEL, CONTEXT_LEN, "model")
    assert card.keys() >= {"created", "owned_by"}
    assert (await world.client.get(f"/v1/models/{MODEL}")).json() == card
    missing = await world.client.get("/v1/models/other")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


async def test_readiness_follows_the_mesh_and_liveness_does_not(tmp_path):
    async with gateway_world(tmp_path, ready=False, replica_silence_s=0.3) as world:
        await eventually(lambda: world.gateway.why_not_ready() is None)
        assert (await world.client.get("/health")).json() == {"status": "ok"}
        world.mesh.load = msgspec.structs.replace(world.mesh.load, accepting=False)
        await eventually(lambda: world.gateway.why_not_ready() is not None)
        refused = await world.client.get("/health")
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert "accepts requests" in error_of(refused)["message"]
        world.mesh.is_silent = True
        await eventually(lambda: world.gateway.why_not_ready() == "no tokenizer is ready")
        assert (await world.client.get("/ready")).status_code == 503
        assert (await world.client.get("/live")).status_code == 200


async def test_metrics_have_the_names_that_dashboards_know(world):
    world.mesh.load = msgspec.structs.replace(world.mesh.load, num_running_reqs=3, num_used_slots=1024)
    await eventually(
        lambda: any(view.load.num_running_reqs == 3 for view in world.gateway.view.replicas(world.gateway.now()))
    )
    await world.complete()
    text = (await world.client.get("/metrics")).text
    for name in (
        "num_running_reqs",
        "num_queue_reqs",
        "num_retracted_reqs",
        "token_usage",
        "generation_tokens_total",
        "prompt_tokens_total",
        "cached_tokens_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "process_resident_memory_bytes",
        "process_open_fds",
    ):
        assert re.search(rf"^(sglang:)?{name}(\{{.*\}})? [\d.e+]+$", text, re.MULTILINE), name
    assert f'sglang:num_running_reqs{{model_name="{MODEL}",replica="replica-1"}} 3.0' in text
    assert f'sglang:token_usage{{model_name="{MODEL}",replica="replica-1"}} 0.25' in text
    assert f'sglang:prompt_tokens_total{{model_name="{MODEL}"}} 2.0' in text
    assert f'sglang:generation_tokens_total{{model_name="{MODEL}"}} 3.0' in text


async def test_texts_and_chats_are_tokenized(world):
    one = await world.client.post("/tokenize", json={"prompt": "hé"})
    assert one.json() == {"tokens": ids("hé"), "count": 3, "max_model_len": CONTEXT_LEN}
    many = await world.client.post("/tokenize", json={"model": MODEL, "prompt": ["a", "bc"]})
    assert (many.json()["tokens"], many.json()["count"]) == ([ids("a"), ids("bc")], [1, 2])
    chat = await world.client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
    assert chat.json()["count"] == 20
    assert (await world.client.post("/tokenize", json={})).status_code == 400


async def test_tokens_are_detokenized_within_the_vocabulary(world):
    assert (await world.client.post("/detokenize", json={"tokens": ids("hé")})).json() == {"text": "hé"}
    refused = await world.client.post("/detokenize", json={"tokens": [1, VOCAB_SIZE]})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "tokens[1]")


async def test_a_flush_adds_up_what_the_replicas_say(world):
    assert (await world.client.post("/flush_cache")).json() == {"num_freed_tokens": 7, "num_kept_tokens": 3}


async def test_the_server_tells_its_settings_but_no_keys(tmp_path):
    async with gateway_world(tmp_path, api_keys=("secret-1",)) as world:
        reply = await world.client.get("/server_info", headers={"Authorization": "Bearer secret-1"})
        info = reply.json()
        assert "secret-1" not in reply.text
        assert info["ready"] is True
        assert info["config"]["port"] == 0
        assert info["replicas"][0]["load"]["replica_id"] == "replica-1"
        assert {member["role"] for member in info["members"]} == {"tokenizer", "router"}
        model = (await world.client.get("/model_info", headers={"Authorization": "Bearer secret-1"})).json()
        assert (model["served_model_name"], model["context_length"], model["is_generation"]) == (
            MODEL,
            CONTEXT_LEN,
            True,
        )


# -- ids and errors


async def test_a_request_id_is_taken_over_or_made(world):
    given = await world.client.get("/v1/models", headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = await world.client.get("/v1/models", headers={"X-Request-Id": "a b"})
    assert re.fullmatch(r"[0-9a-f]{32}", made.headers["x-request-id"])
    body = await world.complete(rid="mine")
    assert (body.headers["x-request-id"], body.json()["id"]) == ("mine", "cmpl-mine")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/no-such-route", 404),
        ("GET", "/v1/models/", 404),
        ("DELETE", "/v1/requests/none", 404),
    ],
)
async def test_unknown_routes_and_methods_are_json_errors(world, method, path, status):
    reply = await world.client.request(method, path)
    assert reply.status_code == status
    error_of(reply)
    assert ("allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_must_say_that_it_is_json(world, content_type):
    body = json.dumps({"model": MODEL, "prompt": "hi"})
    reply = await world.client.post("/v1/completions", content=body, headers={"Content-Type": content_type})
    assert reply.status_code == 415
    error_of(reply)


async def test_a_body_beyond_the_limit_is_413_with_the_limit_and_the_connection_goes_on(tmp_path):
    async with gateway_world(tmp_path, max_body_bytes=2048) as world:
        declared = await world.complete(padding="x" * 4096)
        assert declared.status_code == 413
        assert "2048" in error_of(declared)["message"]

        async def chunks():
            for _ in range(100):
                yield b" " * 1000

        chunked = await world.client.post(
            "/v1/completions", content=chunks(), headers={"Content-Type": "application/json"}
        )
        assert chunked.status_code == 413
        assert (await world.complete(padding="x" * 1024)).status_code == 200


async def test_a_body_never_exceeds_what_the_bus_takes(world):
    assert world.gateway.max_body_bytes == world.bus.max_payload


async def test_what_is_no_http_is_400_and_a_huge_head_431(world):
    assert (await raw(world, b"\x00\x01nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400")
    huge = b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"X-Pad: " + b"x" * 100_000 + b"\r\n\r\n"
    answer = await raw(world, huge)
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"65536" in answer
    assert (await world.client.get("/live")).status_code == 200


async def test_a_short_body_is_no_request(world):
    assert await raw_short(world) in (b"", b"HTTP/1.1 400")


async def raw_short(world: World) -> bytes:
    """Announce more than is sent, then end the sending side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.actor.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{}")
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer[:12]


async def test_a_client_may_ask_before_it_sends_its_body(world):
    reader, writer = await asyncio.open_connection("127.0.0.1", world.actor.port)
    body = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head)
    assert (await reader.readline()).startswith(b"HTTP/1.1 100")
    writer.write(body)
    await reader.readline()
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_connections_beyond_the_limit_are_told_to_come_back(tmp_path):
    async with gateway_world(tmp_path, max_connections=3) as world:
        idle = [await asyncio.open_connection("127.0.0.1", world.actor.port) for _ in range(3)]
        async with httpx.AsyncClient(base_url=str(world.client.base_url), trust_env=False) as another:
            refused = await another.get("/v1/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "3 connections" in error_of(refused)["message"]
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()
        async with httpx.AsyncClient(base_url=str(world.client.base_url), trust_env=False) as another:
            await eventually(lambda: world.actor.server.num_connections < 3)
            assert (await another.get("/v1/models")).status_code == 200


async def test_requests_beyond_the_limit_are_told_to_come_back(tmp_path):
    async with gateway_world(tmp_path, max_active_requests=1) as world:
        world.mesh.answer = lambda submit: None
        first = asyncio.create_task(world.complete(rid="one"))
        await world.mesh.until_submitted()
        refused = await world.complete()
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        await world.client.delete("/v1/requests/one")
        await first


async def test_more_generations_than_allowed_are_refused_with_both_numbers(tmp_path):
    async with gateway_world(tmp_path, max_choices=4) as world:
        refused = await world.complete(prompt=["a", "b"], n=3)
        assert refused.status_code == 400
        assert "6 generations, the limit is 4" in error_of(refused)["message"]


# -- keys


async def test_without_a_known_key_nothing_but_probes_is_answered(tmp_path):
    async with gateway_world(tmp_path, api_keys=("k1", "k2")) as world:
        assert (await world.client.get("/health")).status_code == 200
        assert (await world.client.get("/metrics")).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic k1"}):
            refused = await world.client.get("/v1/models", headers=headers)
            assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
        for headers in ({"Authorization": "Bearer k1"}, {"Authorization": "bearer k2"}, {"X-Api-Key": "k1"}):
            assert (await world.client.get("/v1/models", headers=headers)).status_code == 200


async def test_keys_and_salts_have_caches_of_their_own(tmp_path):
    async with gateway_world(tmp_path, api_keys=("k1", "k2")) as world:
        for key in ("k1", "k2"):
            for salt in (None, "s", "s2"):
                body = {"model": MODEL, "prompt": "hi"} | ({} if salt is None else {"cache_salt": salt})
                headers = {"Authorization": f"Bearer {key}"}
                for _ in range(2):
                    assert (await world.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        namespaces = [submit.namespace for submit in world.mesh.submits]
        assert len(set(namespaces)) == 6
        assert namespaces[::2] == namespaces[1::2]
        assert not any(secret in namespace for namespace in namespaces for secret in ("k1", "k2"))


async def test_without_keys_and_salt_the_cache_is_shared(world):
    await world.complete()
    await world.complete(cache_salt="s")
    assert [bool(submit.namespace) for submit in world.mesh.submits] == [False, True]


async def test_one_keys_requests_are_invisible_to_another(tmp_path):
    async with gateway_world(tmp_path, api_keys=("k1", "k2")) as world:
        world.mesh.answer = lambda submit: None
        body = {"model": MODEL, "prompt": "hi", "rid": "mine"}
        mine = {"Authorization": "Bearer k1"}
        waiting = asyncio.create_task(world.client.post("/v1/completions", json=body, headers=mine))
        await world.mesh.until_submitted()
        other = await world.client.delete("/v1/requests/mine", headers={"Authorization": "Bearer k2"})
        assert other.status_code == 404
        assert (await world.client.delete("/v1/requests/mine", headers=mine)).status_code == 200
        await waiting


async def test_a_quota_is_429_with_the_time_to_wait(tmp_path):
    async with gateway_world(tmp_path, max_requests_per_minute=2) as world:
        statuses = [(await world.complete()).status_code for _ in range(2)]
        refused = await world.complete()
        assert (statuses, refused.status_code) == ([200, 200], 429)
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert "2 requests per minute" in error_of(refused)["message"]


# -- browsers


async def test_cors_is_off_unless_configured(world):
    reply = await world.client.get("/v1/models", headers={"Origin": "https://app.example"})
    assert "access-control-allow-origin" not in reply.headers


async def test_configured_origins_may_call(tmp_path):
    async with gateway_world(tmp_path, cors_origins=("https://app.example",)) as world:
        asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        preflight = await world.client.options("/v1/chat/completions", headers=asked)
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        foreign = await world.client.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in foreign.headers


# -- settings


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_an_open_server_stays_on_loopback_unless_told_otherwise(host):
    with pytest.raises(ConfigError, match="api_keys"):
        load_config(GatewayConfig, "gateway", ["--host", host], {})
    assert load_config(GatewayConfig, "gateway", ["--host", host, "--api-keys", "k"], {}).api_keys == ("k",)
    assert load_config(GatewayConfig, "gateway", ["--host", host, "--allow-unauthenticated"], {}).host == host


async def test_a_client_that_does_not_send_is_cut_off(tmp_path):
    async with gateway_world(tmp_path, receive_timeout_s=0.2) as world:
        assert await raw(world, b"") == b""
        assert await raw(world, b"GET /live HTTP/1.1\r\nHost: x\r\nX-Slow: ") == b""
        started = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        assert (await raw(world, started)).startswith(b"HTTP/1.1 408")
        assert (await world.client.get("/live")).status_code == 200
