"""`radixmesh bench`: how fast a running server is."""

import asyncio
import platform
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from radixmesh.bench.measure import Sample, Summary, run, summarise
from radixmesh.bench.report import latency_plot, table_of
from radixmesh.bench.workloads import WORKLOADS, Texts, Workload, build, read_questions
from radixmesh.client import AsyncClient
from radixmesh.client.protocol import DEFAULT_BASE_URL


@click.command("bench")
@click.option(
    "--base-url", default=DEFAULT_BASE_URL, show_default=True, help="The server; any that speaks the OpenAI API."
)
@click.option("--model", default="", help="A model that the server lists; the first one by default.")
@click.option("--api-key", envvar="RADIXMESH_API_KEY", help="Also taken from RADIXMESH_API_KEY.")
@click.option(
    "--workload",
    "names",
    multiple=True,
    type=click.Choice(WORKLOADS),
    help="May be given several times; all by default.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="Run each workload so often.")
@click.option(
    "--seed", default="", help="Decides the texts; a new one each time by default, so that no cache knows them."
)
@click.option(
    "--questions",
    type=click.Path(path_type=Path),
    help="JSONL file whose lines have a `question`, instead of made ones.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write all figures to this file.")
def bench_command(
    base_url: str,
    model: str,
    api_key: str | None,
    names: Sequence[str],
    rounds: int,
    seed: str,
    questions: Path | None,
    json_file: Path | None,
) -> None:
    """Load a running server with typical work and show throughput and latencies.

    \b
    chat-N       unrelated questions, N at a time
    few-shot     many questions behind the same examples
    tree         prefixes that branch
    multi-turn   conversations that grow
    long-prompt  prompts of some 2,000 tokens
    json-N       documents that must fit a JSON schema
    """
    given = read_questions(questions) if questions else []
    seed = seed or secrets.token_hex(3)
    workloads = [
        build(name, Texts(f"{seed}.{number}", given)) for name in names or WORKLOADS for number in range(rounds)
    ]
    console = Console()
    summaries, samples = asyncio.run(_measure(base_url, model, api_key, workloads, console))
    console.print(table_of(summaries))
    console.print()
    console.print(latency_plot(samples))
    console.print(f"\nseed {seed}, {platform.machine()}, {base_url}", style="dim", highlight=False)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode({"seed": seed, "runs": summaries})))


async def _measure(
    base_url: str, model: str, api_key: str | None, workloads: Sequence[Workload], console: Console
) -> tuple[list[Summary], dict[str, list[Sample]]]:
    summaries: list[Summary] = []
    samples: dict[str, list[Sample]] = {}
    columns: tuple[Any, ...] = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    async with AsyncClient(base_url, model=model, api_key=api_key) as client:
        await client.generate("Hello", max_tokens=8)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            for workload in workloads:
                task = progress.add_task(workload.name, total=sum(call.num_requests for call in workload.calls))
                taken, wall_s = await run(client, workload, partial(progress.advance, task))
                summaries.append(summarise(workload, taken, wall_s))
                samples.setdefault(workload.name, []).extend(taken)
                progress.remove_task(task)
    return summaries, samples
