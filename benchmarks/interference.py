"""What a long prompt does to running streams: `python -m benchmarks.interference`.

Eight streams decode with the real model while a prompt of 4,000 tokens is prefilled in chunks. Each step of that time carries
a chunk and one token for every stream, so the longest gap between two tokens of a stream should be one such step. The gap is
printed beside the mean step of the same time, and beside the time that the prompt would block everything without chunks.
"""

import argparse
import asyncio
import itertools

from benchmarks.machine import default_model, describe_machine
from tests.support.bus_client import BusClient
from tests.support.stack import Stack

NUM_STREAMS = 8


async def measure(client: BusClient, prompt_len: int) -> None:
    running = [await client.submit(range(100 + i, 132 + i), 4000) for i in range(NUM_STREAMS)]
    while not all(len(generated.token_ids) > 8 for _, generated in running):
        await client.next_load()
    loop = asyncio.get_running_loop()
    before = await client.next_load()
    started = loop.time()
    await client.generate([(7 * i) % 40_000 + 50 for i in range(prompt_len)], 1)
    ended = loop.time()
    after = await client.next_load()
    for request_id, _ in running:
        await client.abort(request_id)
    prefill_s = ended - started
    step_s = (after.executor_run_us - before.executor_run_us) / (after.num_steps - before.num_steps) / 1e6
    gaps = [
        later - earlier
        for _, generated in running
        for earlier, later in itertools.pairwise(time for time in generated.times if started <= time <= ended)
    ]
    print(
        f"prefill of {prompt_len} tokens   {prefill_s * 1e3:7.0f} ms: without chunks, every stream would wait so long"
    )
    print(f"mean step meanwhile       {step_s * 1e3:7.0f} ms")
    print(f"longest gap of a stream   {max(gaps) * 1e3:7.0f} ms   ({max(gaps) / step_s:.2f} steps)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", type=int, default=4000)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    print(describe_machine())

    async def run(stack: Stack) -> None:
        async with BusClient(stack.nats.url, stack.model) as client:
            await measure(client, args.prompt_len)

    with Stack(model_path=default_model()) as stack:
        stack.start_all("--dtype", args.dtype, "--num-slots", "48000")
        asyncio.run(run(stack))


if __name__ == "__main__":
    main()
