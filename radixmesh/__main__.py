"""The `radixmesh` command: what a user can type, and errors as one line."""

import sys
from importlib.metadata import version

import click

from radixmesh.client import ClientError
from radixmesh.command.bench import bench_command
from radixmesh.command.models import models_command
from radixmesh.command.serve import serve_command, settings_command
from radixmesh.command.talk import chat_command, generate_command
from radixmesh.errors import CommandError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(version("radixmesh"), message="%(prog)s %(version)s")
def cli() -> None:
    """Serve large language models, and talk to them.

    \b
    radixmesh serve                       start a server (the first start fetches a small model)
    radixmesh chat                        chat with it, in a second terminal
    radixmesh generate "Once upon a"      continue a text
    radixmesh bench                       measure it
    """


for _command in (serve_command, generate_command, chat_command, bench_command, models_command, settings_command):
    cli.add_command(_command)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 something is not as it must be, 2 wrong usage, 130 interrupted."""
    try:
        code = cli.main(standalone_mode=False, prog_name="radixmesh")
    except click.ClickException as error:  # its usage errors show the usage and exit with 2
        error.show()
        sys.exit(error.exit_code)
    except CommandError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except ClientError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
