"""`radixmesh models`: the models known by name, and fetching one ahead of time."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from radixmesh.models.registry import KNOWN_MODELS
from radixmesh.models.store import ModelStore, cache_root, point_to


def open_store(console: Console) -> ModelStore:
    return ModelStore(
        cache_root(), on_wait=lambda key: console.print(f"Another process prepares {key}: waiting for it.")
    )


@click.group("models")
def models_command() -> None:
    """List models, or fetch one ahead of time."""


@models_command.command("list")
def list_command() -> None:
    """List the models that are known by a short name, and whether they are here."""
    console = Console()
    store = open_store(console)
    table = Table("name", "parameters", "licence", "from", "fetched", box=None, header_style="bold")
    for model in KNOWN_MODELS.values():
        fetched = "yes" if store.has(model.name) else "no"
        table.add_row(model.name, f"{model.num_parameters / 1e6:.0f} M", model.licence, str(model.source), fetched)
    console.print(table)
    click.echo(f"\nFetched models lie in {cache_root()}.")
    click.echo("--model also takes a local folder, a GGUF file, or a Hugging Face hub id (org/name).")


@models_command.command("pull")
@click.argument("model")
@click.option("--link", type=click.Path(path_type=Path), help="Also let this path lead to the model's folder.")
def pull_command(model: str, link: Path | None) -> None:
    """Fetch MODEL and convert it if need be; print the folder it is in."""
    from radixmesh.models.progress import Display
    from radixmesh.models.resolve import resolve_model

    console = Console(stderr=True)
    folder = resolve_model(model, open_store(console), Display(console)).folder
    if link is not None:
        point_to(link, folder)
    click.echo(folder)
