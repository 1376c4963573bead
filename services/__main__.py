"""Several services in one process, over one bus connection: `python -m services gateway tokenizer grammar router`.

A flag goes to each of the services that know it. Services are imported when they are named: without the worker, no torch.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.config import ConfigError, StartupError, load_configs
from shared.service import Hosted, named, run_services


def main(argv: Sequence[str]) -> int:
    """Run the services named before the first flag; returns the exit code."""
    roles = []
    for argument in argv:
        if argument.startswith("-"):
            break
        roles.append(argument)
    try:
        return run_services(_hosted(roles, argv[len(roles) :]))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _hosted(roles: Sequence[str], flags: Sequence[str]) -> list[Hosted]:
    known = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.ispkg)
    if not roles:
        raise ConfigError(f"name the services to run, of {', '.join(known)}")
    for role in roles:
        if role not in known:
            raise ConfigError(f"there is no service {role!r}, only {', '.join(known)}")
    if len(set(roles)) < len(roles):
        raise ConfigError(f"each service runs once in a process: {' '.join(roles)}")
    modules = {role: importlib.import_module(f"services.{role}.__main__") for role in roles}
    configs = load_configs({role: module.CONFIG for role, module in modules.items()}, flags, os.environ)
    if len(roles) > 1 and len({config.instance for config in configs.values() if config.instance}) == 1:
        raise ConfigError(
            "--instance names one service, here are several: set RADIXMESH_<ROLE>_INSTANCE, or leave it out"
        )
    return [Hosted(role, named(configs[role], role), modules[role].build) for role in roles]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
