"""`radixmesh generate` and `radixmesh chat`: talk to a running server."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

import click

from radixmesh.client import Chunk, Client, Message, ServerUnreachable, Usage
from radixmesh.client.protocol import DEFAULT_BASE_URL
from radixmesh.errors import CommandError

_HELP_IN_CHAT = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C cuts an answer short."

F = TypeVar("F", bound=Callable[..., Any])


def _connection_options(command: F) -> F:
    for option in reversed(
        (
            click.option("--base-url", default=DEFAULT_BASE_URL, show_default=True, help="The server."),
            click.option("--model", default="", help="A model that the server lists; the first one by default."),
            click.option("--api-key", envvar="RADIXMESH_API_KEY", help="Also taken from RADIXMESH_API_KEY."),
            click.option("--max-tokens", type=click.IntRange(min=1), help="Generate at most so many tokens."),
            click.option("--temperature", type=click.FloatRange(min=0), help="0 always takes the likeliest token."),
            click.option("--seed", type=int, help="The same seed gives the same answer."),
        )
    ):
        command = option(command)
    return command


@click.command("generate")
@click.argument("prompt")
@_connection_options
@click.option("--chat", is_flag=True, help="Send PROMPT as a chat message instead of continuing it as text.")
def generate_command(prompt: str, chat: bool, base_url: str, model: str, api_key: str | None, **params: Any) -> None:
    """Continue the text PROMPT and print what comes. A single - reads it from standard input."""
    if prompt == "-":
        prompt = sys.stdin.read()
    with Client(base_url, model=model, api_key=api_key) as client:
        _print_answer(client, [{"role": "user", "content": prompt}] if chat else prompt, params)


@click.command("chat")
@_connection_options
@click.option("--system", default="", help="A system message to begin with.")
def chat_command(system: str, base_url: str, model: str, api_key: str | None, **params: Any) -> None:
    """Chat with a running server, line by line."""
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with Client(base_url, model=model, api_key=api_key) as client:
        served = _explained(client.models)
        if sys.stdin.isatty():
            import readline  # noqa: F401  # makes input() editable and gives it a history

            click.secho(f"{model or served[0]} at {base_url}. {_HELP_IN_CHAT}", dim=True)
        while (line := _read_line()) is not None:
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                messages = list(opening)
                click.secho("Forgotten.", dim=True)
            elif line.startswith("/"):
                click.secho(_HELP_IN_CHAT, dim=True)
            elif line.strip():
                messages.append({"role": "user", "content": line})
                text = _print_answer(client, messages, params)
                messages.append({"role": "assistant", "content": text})


def _read_line() -> str | None:
    """A line of the user; None at the end of input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:  # at the prompt it only clears the line, as in a shell
            click.echo()


def _print_answer(client: Client, prompt: str | Sequence[Message], params: dict[str, Any]) -> str:
    """Print an answer as it comes; its text. Ctrl-C ends it early, on the server too. Raises CommandError."""
    given = {name: value for name, value in params.items() if value is not None}
    pieces: list[str] = []
    usage: Usage | None = None
    first_s: float | None = None

    def take(chunk: Chunk) -> None:
        nonlocal usage, first_s
        usage = chunk.usage or usage
        if chunk.text:
            first_s = first_s or time.monotonic()
            pieces.append(chunk.text)
            click.echo(chunk.text, nl=False)
            sys.stdout.flush()

    def print_all() -> None:
        with closing(client.stream(prompt, **given)) as chunks:
            for chunk in chunks:
                take(chunk)

    try:
        _explained(print_all)
    except KeyboardInterrupt:
        click.secho(" (cut short)", dim=True, err=True, nl=False)
    click.echo()
    if usage and first_s and sys.stderr.isatty():
        rate = (usage.completion_tokens - 1) / max(time.monotonic() - first_s, 1e-9)
        cached = f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
        click.secho(f"{usage.completion_tokens} tokens, {rate:.0f} tokens/s, {cached}", dim=True, err=True)
    return "".join(pieces)


T = TypeVar("T")


def _explained(call: Callable[[], T]) -> T:
    """Raises CommandError that says how to get a server when there is none."""
    try:
        return call()
    except ServerUnreachable as error:
        raise CommandError(f"{error}; start one with `radixmesh serve`, or name another with --base-url") from error
