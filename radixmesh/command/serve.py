"""`radixmesh serve` and `radixmesh settings`."""

import os
from collections.abc import Iterable

import click
from rich.console import Console
from rich.table import Table

from radixmesh.serve.settings import Setting, all_settings, load_settings

_COMMON = (
    *("model", "served_model_name", "port", "host", "api_keys", "dtype", "num_slots", "max_running_reqs", "overlap"),
    *("replicas", "nats_url", "nats_port", "start_timeout_s", "log_level", "log_format"),
)
"""The settings that `radixmesh serve --help` shows; the others are flags as well, and `radixmesh settings` lists them."""

_METAVARS = {"boolean": None, "array": "A,B,..."} | {kind: kind.upper() for kind in ("string", "integer", "number")}
_SHORTER = {"max_running_reqs": ("--max-running",)}


def option_of(setting: Setting) -> click.Option:
    """The flag of a setting. Its value stays text: the config Structs judge it."""
    facts = [fact for fact in (_default(setting), *setting.limits) if fact]
    text = setting.description + (f"  [{', '.join(facts)}]" if facts else "")
    declaration = (
        f"{setting.flag}/--no-{setting.flag.removeprefix('--')}" if setting.kind == "boolean" else setting.flag
    )
    return click.Option(
        [declaration],
        default=None,
        metavar=_METAVARS.get(setting.kind, setting.kind),
        help=text,
        hidden=setting.name not in _COMMON,
    )


def _default(setting: Setting) -> str:
    if setting.default in (None, "", [], ()):
        return ""
    if setting.kind == "boolean":
        return "default: on" if setting.default else "default: off"
    return f"default: {setting.default}"


def _in_order(settings: Iterable[Setting]) -> list[Setting]:
    """Common ones first, in the order above."""
    return sorted(settings, key=lambda s: _COMMON.index(s.name) if s.name in _COMMON else len(_COMMON))


def _serve(config: str | None, **flags: str | bool | None) -> None:
    from radixmesh.serve.run import serve  # what it imports is slow, and no other command needs it

    argv = ["--config", config] if config else []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            argv.append(f"--{flag}={value}")
    raise SystemExit(serve(load_settings(argv, os.environ), os.environ))


serve_command = click.Command(
    "serve",
    callback=_serve,
    params=[
        *(option_of(setting) for setting in _in_order(all_settings())),
        click.Option(["--config"], metavar="FILE", help="TOML file with settings, one table for each service."),
    ],
    short_help="Start a server: NATS, all services, the model.",
    help="""Start a server on this machine: NATS, all services, and the model, which is fetched at the first start.

    The OpenAI API is then at http://localhost:8000/v1. Ctrl-C stops everything.

    Every setting of every service is a flag of this command, a variable RADIXMESH_<NAME>, and an entry of the TOML file;
    `radixmesh settings` lists them all. Below are the common ones.
    """,
)


@click.command("settings")
@click.option("--markdown", is_flag=True, help="As a Markdown table.")
def settings_command(markdown: bool) -> None:
    """List every setting: flag, default, who reads it, what it does."""
    rows = [
        (
            setting.flag.replace("--", "--[no-]", 1) if setting.kind == "boolean" else setting.flag,
            _shown(setting.default),
            "all" if len(setting.roles) >= 6 else ", ".join(setting.roles),
            setting.description,
        )
        for setting in all_settings()
    ]
    if markdown:
        click.echo("| flag | default | of | meaning |\n|---|---|---|---|")
        for flag, default, roles, description in rows:
            click.echo(f"| `{flag}` | {f'`{default}`' if default else ''} | {roles} | {description} |")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("flag", no_wrap=True)
    for heading in ("default", "of", "meaning"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default in (None, [], ()) else str(default)
