"""How requests end before their time: clients leave, owners abort, replicas die, deadlines pass, readers stall."""

import asyncio
import contextlib
import json
import socket

import httpx
import pytest

from shared.messages.generation import (
    UNKNOWN_REQUEST,
    Abort,
    Emission,
    Finish,
    FinishReason,
    RejectCode,
    Rejected,
    Resync,
    Submit,
)
from shared.messages.packing import unpack_int32
from tests.support.gateway_world import MODEL, Mesh, World, emissions, eventually, gateway_world, ids, says


def runs_on(text: str = "abc"):
    """Begin to answer, and never finish."""

    def answer(submit: Submit) -> list[Emission]:
        return emissions(submit, ids(text), finish=None)

    return answer


def never(submit: Submit) -> None:
    """Accept, and stay silent: it waits in the queue."""


async def leave(world: World, path: str, body: dict, after_bytes: bytes | None) -> None:
    """Send a request on a raw socket, read up to `after_bytes`, and hang up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.actor.port)
    content = json.dumps({"model": MODEL} | body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    if after_bytes is not None:
        await reader.readuntil(after_bytes)
    else:
        await world.mesh.until_submitted()
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("answer", [runs_on(), never])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_is_an_abort_of_every_choice(world, stream, answer, n):
    world.mesh.answer = answer
    body = {"prompt": "hi", "max_tokens": 50, "stream": stream, "n": n}
    await leave(world, "/v1/completions", body, b"text_completion" if stream and answer is not never else None)
    await world.mesh.until(lambda: len(aborts(world.mesh)) >= n)
    assert {abort.request_id for abort in aborts(world.mesh)} == {submit.request_id for submit in world.mesh.submits}
    assert {abort.reason for abort in aborts(world.mesh)} == {"client"}
    assert world.gateway.num_active == 0


def aborts(mesh: Mesh) -> list[Abort]:
    return [message for message in mesh.told if isinstance(message, Abort)]


async def test_a_client_that_leaves_while_its_prompt_is_encoded_is_never_submitted(world):
    arrived = asyncio.Event()

    async def hold(subject, payload, *, reply=""):
        arrived.set()  # the tokenizer's answer is lost

    world.mesh.bus.publish = hold
    _reader, writer = await asyncio.open_connection("127.0.0.1", world.actor.port)
    content = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
    await arrived.wait()
    assert world.gateway.num_active == 1
    writer.close()
    await eventually(lambda: not world.gateway.num_active)
    assert not world.mesh.submits


async def test_a_client_that_leaves_while_its_submission_is_unanswered_is_aborted_when_it_is(world):
    """The answer says whom to tell."""
    publish, held = world.mesh.bus.publish, []

    async def hold_answers(subject, payload, *, reply=""):
        if subject.startswith("_INBOX") and world.mesh.submits:
            held.append((subject, payload))
        else:
            await publish(subject, payload, reply=reply)

    world.mesh.answer = never
    world.mesh.bus.publish = hold_answers
    await leave(world, "/v1/completions", {"prompt": "hi", "stream": False}, None)
    await eventually(lambda: not world.gateway.num_active)
    world.mesh.bus.publish = publish
    for subject, payload in held:
        await publish(subject, payload)
    abort = await world.mesh.until_told(Abort)
    assert abort.request_id == world.mesh.submits[0].request_id


async def test_a_request_can_be_aborted_by_its_id_before_its_first_token(world):
    world.mesh.answer = never
    waiting = asyncio.create_task(world.complete(rid="mine"))
    await world.mesh.until_submitted()
    assert (await world.client.post("/abort_request", json={"rid": "min"})).status_code == 404
    assert (await world.client.delete("/v1/requests/mine")).json() == {"rid": "mine", "aborted": True}
    reply = await waiting
    assert (reply.status_code, reply.json()["error"]["code"]) == (499, "aborted")
    assert reply.headers["x-request-id"] == "mine"
    assert (await world.mesh.until_told(Abort)).request_id == world.mesh.submits[0].request_id
    assert (await world.client.post("/abort_request", json={"rid": "mine"})).status_code == 404


async def test_any_id_of_a_batch_ends_the_call(world):
    world.mesh.answer = never
    body = {"text": ["a", "b"], "rid": ["one", "two"]}
    waiting = asyncio.create_task(world.client.post("/generate", json=body))
    await world.mesh.until_submitted(2)
    assert (await world.client.delete("/v1/requests/two")).status_code == 200
    assert (await waiting).status_code == 499
    assert len({abort.request_id for abort in aborts(world.mesh)}) == 2
    assert (await world.client.delete("/v1/requests/one")).status_code == 404


async def test_an_abort_inside_a_stream_is_an_error_event_without_done(world):
    world.mesh.answer = runs_on()
    streaming = asyncio.create_task(world.stream_completion(rid="mine"))
    await world.mesh.until_submitted()
    assert (await world.client.post("/abort_request", json={"rid": "mine"})).status_code == 200
    events = await streaming
    assert events[-1]["error"]["code"] == "aborted"


async def test_two_requests_of_one_id_cannot_run_at_once(world):
    world.mesh.answer = never
    first = asyncio.create_task(world.complete(rid="mine"))
    await world.mesh.until_submitted()
    second = await world.complete(rid="mine")
    assert (second.status_code, second.json()["error"]["param"]) == (400, "rid")
    await world.client.delete("/v1/requests/mine")
    await first


@pytest.mark.parametrize(("answer", "phase"), [(never, "queueing"), (runs_on(), "generating")])
async def test_a_deadline_names_the_phase(world, answer, phase):
    world.mesh.answer = answer
    reply = await world.complete(timeout=0.3)
    assert reply.status_code == 504
    assert f"still {phase} when its deadline of 0.3 s passed" in reply.json()["error"]["message"]
    assert (await world.mesh.until_told(Abort)).reason == "deadline_exceeded"
    events = await world.stream_completion(timeout=0.3)
    assert phase in events[-1]["error"]["message"]


async def test_the_server_has_deadlines_of_its_own(tmp_path):
    async with gateway_world(tmp_path, request_timeout_s=5.0, queue_timeout_s=0.2) as world:
        world.mesh.answer = never
        reply = await world.complete(timeout=3.0)
        assert (reply.status_code, "deadline of 0.2 s" in reply.text) == (504, True)
        assert world.mesh.submits[0].deadline_ms is not None


async def test_missing_tokens_are_asked_for_and_repeated_ones_dropped(world):
    world.mesh.answer = never
    streaming = asyncio.create_task(world.stream_completion())
    submit = await world.mesh.until_submitted()
    sent = emissions(submit, ids("hello"), finish=FinishReason.STOP)
    world.mesh.emit(submit, sent[0])
    world.mesh.emit(submit, sent[0])
    world.mesh.emit(submit, sent[3])
    resync = await world.mesh.until_told(Resync)
    assert (resync.request_id, resync.position, resync.gateway_id) == (submit.request_id, 1, "gw")
    world.mesh.emit(submit, *sent[1:])
    events = await streaming
    assert "".join(choice["text"] for event in events[:-1] for choice in event["choices"]) == "hello"


async def test_a_silent_replica_loses_its_requests_to_another_one(tmp_path):
    async with gateway_world(tmp_path, replica_silence_s=0.5) as world:
        world.mesh.answer = runs_on("hel")
        streaming = asyncio.create_task(world.stream_completion(seed=7))
        first = await world.mesh.until_submitted()
        await eventually(lambda: world.gateway.metrics.generation_tokens._value.get() == 3)
        world.mesh.is_silent = True
        world.mesh.answer = lambda submit: emissions(submit, ids("hello"), finish=FinishReason.STOP)[3:]
        # The router sends the resumed request to a replica that speaks.
        world.mesh.replica_id = "replica-2"
        resumed = await world.mesh.until_submitted(2)
        assert (resumed.request_id, unpack_int32(resumed.resumed)) == (first.request_id, ids("hel"))
        assert resumed.sampling == first.sampling
        events = await streaming
        assert "".join(choice["text"] for event in events[:-1] for choice in event["choices"]) == "hello"


async def test_when_no_replica_is_found_the_request_fails_in_bounded_time(tmp_path):
    async with gateway_world(tmp_path, replica_silence_s=0.3, failover_timeout_s=0.3) as world:
        world.mesh.answer = runs_on()
        streaming = asyncio.create_task(world.stream_completion())
        await world.mesh.until_submitted()
        nobody = Rejected(code=RejectCode.NO_REPLICA, message="no replica is running", retry_after_s=1.0)
        world.mesh.answer = lambda submit: nobody
        world.mesh.is_silent = True
        events = await streaming
        assert events[-1]["error"]["message"] == "no replica is running"


async def test_a_new_request_waits_a_moment_for_a_replica_that_changes_its_worker(world):
    nobody = Rejected(code=RejectCode.NO_REPLICA, message="no replica is running", retry_after_s=1.0)
    world.mesh.answer = lambda submit: nobody
    completing = asyncio.create_task(world.complete())
    await world.mesh.until_submitted(2)
    world.mesh.answer = lambda submit: emissions(submit, ids("hello"), finish=FinishReason.STOP)
    reply = await completing
    assert (reply.status_code, reply.json()["choices"][0]["text"]) == (200, "hello")


async def test_a_stream_is_kept_alive_while_another_replica_is_looked_for(tmp_path):
    async with gateway_world(tmp_path, replica_silence_s=0.3, keepalive_s=0.2) as world:
        world.mesh.answer = runs_on("he")
        body = {"model": MODEL, "prompt": "hi", "stream": True}
        async with world.client.stream("POST", "/v1/completions", json=body) as response:
            await world.mesh.until_submitted()
            await eventually(lambda: world.gateway.metrics.generation_tokens._value.get() == 2)
            nobody = Rejected(code=RejectCode.NO_REPLICA, message="no replica is running", retry_after_s=1.0)
            world.mesh.answer = lambda submit: nobody
            world.mesh.is_silent = True
            lines = response.aiter_lines()
            await world.mesh.until_submitted(2)
            async for line in lines:
                if line.startswith(":"):
                    break
            world.mesh.replica_id = "replica-2"
            world.mesh.answer = lambda submit: emissions(submit, ids("hello"), finish=FinishReason.STOP)[2:]
            rest = [line async for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"


async def test_late_tokens_of_a_replica_that_was_given_up_are_ignored_and_it_is_told(tmp_path):
    async with gateway_world(tmp_path, replica_silence_s=0.3) as world:
        world.mesh.answer = never
        streaming = asyncio.create_task(world.stream_completion())
        submit = await world.mesh.until_submitted()
        world.mesh.is_silent = True
        world.mesh.replica_id = "replica-2"
        await world.mesh.until_submitted(2)
        world.mesh.replica_id = "replica-1"
        world.mesh.emit(submit, *emissions(submit, ids("old"), finish=None))
        assert (await world.mesh.until_told(Abort)).reason == "superseded"
        world.mesh.replica_id = "replica-2"
        world.mesh.emit(submit, *emissions(submit, ids("new"), finish=FinishReason.STOP))
        events = await streaming
        assert "".join(choice["text"] for event in events[:-1] for choice in event["choices"]) == "new"


async def test_a_scheduler_that_has_forgotten_a_request_gets_it_again(world):
    world.mesh.answer = runs_on("he")
    waiting = asyncio.create_task(world.complete())
    submit = await world.mesh.until_submitted()
    world.mesh.answer = lambda submit: emissions(submit, ids("hello"), finish=FinishReason.STOP)[2:]
    unknown = Emission(
        request_id=submit.request_id,
        position=2,
        token_ids=b"",
        finish=FinishReason.ERROR,
        error=UNKNOWN_REQUEST,
        num_worker_deaths=1,
    )
    world.mesh.emit(submit, unknown)
    resumed = await world.mesh.until_submitted(2)
    assert unpack_int32(resumed.resumed) == ids("he")
    assert (submit.num_worker_deaths, resumed.num_worker_deaths) == (0, 1)
    assert (await waiting).json()["choices"][0]["text"] == "hello"


async def test_tokens_for_nobody_are_answered_with_an_abort(world):
    stranger = Submit(request_id="gw.unknown", gateway_id="gw", prompt=b"\0\0\0\0", max_new_tokens=1)
    world.mesh.emit(stranger, *emissions(stranger, ids("a"), finish=None))
    assert (await world.mesh.until_told(Abort)).request_id == "gw.unknown"


async def test_aborts_posted_while_the_bus_is_away_are_sent_when_it_is_back(world):
    world.mesh.answer = runs_on()
    streaming = asyncio.create_task(world.stream_completion(rid="mine"))
    await world.mesh.until_submitted()
    await world.until_accepted()
    world.bus.disconnect()
    world.gateway.abort("mine", key="")
    await streaming
    assert not aborts(world.mesh)
    world.bus.reconnect()
    await world.mesh.until_told(Abort)


async def test_without_a_bus_new_requests_get_503_and_streams_stay_open(tmp_path):
    async with gateway_world(tmp_path, unavailable_after_s=0.2, replica_silence_s=0.5) as world:
        world.mesh.answer = never
        streaming = asyncio.create_task(world.stream_completion())
        submit = await world.mesh.until_submitted()
        await world.until_accepted()
        world.bus.disconnect()
        reply = await world.complete()
        assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
        assert (await world.client.get("/health")).status_code == 503
        assert (await world.client.get("/live")).status_code == 200
        await asyncio.sleep(0.8)  # longer than a replica may be silent: it was not to be heard
        world.bus.reconnect()
        world.mesh.emit(submit, *emissions(submit, ids("on"), finish=FinishReason.STOP))
        events = await streaming
        assert "".join(choice["text"] for event in events[:-1] for choice in event["choices"]) == "on"
        assert len(world.mesh.submits) == 1


async def test_a_silent_stream_is_kept_alive_by_comments(tmp_path):
    async with gateway_world(tmp_path, keepalive_s=0.2) as world:
        world.mesh.answer = never
        body = {"model": MODEL, "prompt": "hi", "stream": True}
        async with world.client.stream("POST", "/v1/completions", json=body) as response:
            submit = await world.mesh.until_submitted()
            lines = response.aiter_lines()
            async for line in lines:
                if line.startswith(":"):
                    break
            world.mesh.emit(submit, *emissions(submit, ids("a"), finish=FinishReason.STOP))
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"


async def test_a_client_that_does_not_read_is_cut_off_and_its_generation_aborted(tmp_path):
    async with gateway_world(tmp_path, slow_client_timeout_s=0.5) as world:
        world.mesh.answer = never
        with contextlib.closing(socket.socket()) as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.setblocking(False)
            await asyncio.get_running_loop().sock_connect(stalled, ("127.0.0.1", world.actor.port))
            body = json.dumps({"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": 400, "n": 100}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            await asyncio.get_running_loop().sock_sendall(stalled, head + body)
            await world.mesh.until_submitted(100)
            for submit in world.mesh.submits:
                world.mesh.emit(submit, *emissions(submit, ids("x" * 300), finish=None))
            await world.mesh.until(lambda: len(aborts(world.mesh)) >= 100, timeout_s=10)
        assert {abort.reason for abort in aborts(world.mesh)} == {"slow_client"}
        assert world.gateway.num_active == 0


async def test_a_drain_lets_running_requests_finish_and_refuses_new_ones(world):
    world.mesh.answer = runs_on("a")
    waiting = asyncio.create_task(world.complete())
    submit = await world.mesh.until_submitted()
    draining = asyncio.create_task(world.actor.drain(5.0))
    await eventually(lambda: world.gateway.is_draining)
    assert (await world.client.get("/ready")).status_code == 503
    refused = await world.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    world.mesh.emit(submit, *emissions(submit, ids("ab"), finish=FinishReason.STOP))
    assert (await waiting).json()["choices"][0]["text"] == "ab"
    await draining


async def test_a_drain_that_takes_too_long_cuts_what_still_runs(world):
    world.mesh.answer = runs_on()
    waiting = asyncio.create_task(world.complete())
    await world.mesh.until_submitted()
    await world.actor.drain(0.2)
    with contextlib.suppress(httpx.TransportError):
        assert (await waiting).status_code == 503
    await world.mesh.until_told(Abort)


async def test_a_finish_that_was_lost_is_followed_by_an_abort(world):
    """A stop string ended the request; a scheduler that did not hear of it goes on."""
    world.mesh.answer = says("a stop b", finish=FinishReason.LENGTH)
    await world.complete(stop=["stop"], max_tokens=8)
    await world.complete(stop=["st"], max_tokens=50)
    world.mesh.told.clear()
    submit = world.mesh.submits[0]
    world.gateway.mesh._landed[submit.request_id] -= 2.0
    world.mesh.emit(submit, *emissions(submit, ids("on and on"), finish=None))
    assert (await world.mesh.until_told(Abort)).request_id == submit.request_id
    assert not any(isinstance(message, Finish) for message in world.mesh.told)
