"""`/v1/completions` from the socket to the bus and back."""

from tests.support.gateway_world import says, gateway_world


async def test_a_completion_is_the_generated_text(tmp_path):
    async with gateway_world(tmp_path) as world:
        world.mesh.answer = says(" world")
        reply = await world.complete(prompt="hello")
        assert reply.status_code == 200, reply.text
        print(reply.json())
        print(await world.stream_completion(prompt="hello"))
        print(await world.stream_chat(stream_options={"include_usage": True}))
        print((await world.chat()).json())
