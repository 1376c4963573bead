"""Settings: one frozen Struct per service, read once at the start.

Precedence, lowest first: defaults < TOML file (top level, then the table of the role) < `RADIXMESH_<FIELD>` <
`RADIXMESH_<ROLE>_<FIELD>` < `--flag`. The file is named by `--config` or `RADIXMESH_CONFIG`. A misspelt flag, a misspelt
setting under a role's own name, or a value outside its limits stops the start with one line that names all of it.
"""

import argparse
import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta
from msgspec import inspect as types

PREFIX = "RADIXMESH_"
_CONFIG_FLAG = "config"

C = TypeVar("C", bound=msgspec.Struct)


class StartupError(Exception):
    """A service cannot start for a reason that its operator can mend: shown as one line, exit code 1, no traceback."""


class ConfigError(StartupError):
    """A setting is unknown or has a value outside its limits."""


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every service can be told. A service's own Struct derives from this and adds its settings."""

    model: Annotated[str, Meta(description="Id of the model that is served; part of every subject.", min_length=1)] = (
        "smollm2-135m-instruct"
    )
    model_path: Annotated[str, Meta(description="Folder of the model: config, tokenizer, weights.")] = ""
    nats_url: Annotated[str, Meta(description="NATS server, or several separated by commas.", min_length=1)] = (
        "nats://127.0.0.1:4222"
    )
    connect_timeout_s: Annotated[float, Meta(description="Wait this long for NATS at the start.", gt=0)] = 60.0
    instance: Annotated[str, Meta(description="Name of this instance in the mesh; made up when empty.")] = ""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least level to log.")] = "info"
    log_format: Annotated[
        Literal["auto", "json", "pretty"], Meta(description="auto: pretty on a terminal, else JSON.")
    ] = "auto"
    drain_timeout_s: Annotated[float, Meta(description="After SIGTERM, finish running work for this long.", ge=0)] = (
        30.0
    )
    otlp_endpoint: Annotated[str, Meta(description="OpenTelemetry collector over HTTP; empty: no export.")] = ""


def load_config(kind: type[C], role: str, argv: Sequence[str], environ: Mapping[str, str]) -> C:
    """The settings of one service. Raises ConfigError; `--help` prints them all and raises SystemExit(0)."""
    return load_configs({role: kind}, argv, environ)[role]


def load_configs(kinds: Mapping[str, type[C]], argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, C]:
    """The settings of services that share a process, by role. A flag goes to each service that knows it."""
    flags = vars(_parser(kinds).parse_args(list(argv)))
    path = flags.pop(_CONFIG_FLAG, None) or environ.get(PREFIX + _CONFIG_FLAG.upper())
    file = _read_file(path) if path else {}
    return {role: _load(kind, role, path or "", file, environ, flags) for role, kind in kinds.items()}


def _load(
    kind: type[C], role: str, path: str, file: Mapping[str, Any], environ: Mapping[str, str], flags: Mapping[str, str]
) -> C:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    given: dict[str, Any] = {}
    for source, name, value in _sources(role, fields, path, file, environ, flags):
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{source}: the {role} has no setting {name!r}{hint}")
        given[name] = _convert(value, fields[name].type, source)
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:  # a required setting, or limits that hold between settings
        raise ConfigError(f"settings of the {role}: {error}") from None


def _sources(
    role: str,
    fields: Mapping[str, Any],
    path: str,
    file: Mapping[str, Any],
    environ: Mapping[str, str],
    flags: Mapping[str, str],
) -> Iterator[tuple[str, str, Any]]:
    """Yields (where it stands, setting, value), lowest precedence first.

    At the top level of the file, in unprefixed variables and in flags, what this service does not know may be meant for
    another one; under its own name it is a mistake.
    """
    yield from ((f"{path}: {name}", name, value) for name, value in file.items() if name in fields)
    table = file.get(role, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [{role}] must be a table, not {table!r}")
    yield from ((f"{path}: [{role}] {name}", name, value) for name, value in table.items())
    # A variable that is set to nothing counts as unset: compose files pass on variables that way.
    for name in fields:
        if value := environ.get(PREFIX + name.upper()):
            yield PREFIX + name.upper(), name, value
    role_prefix = f"{PREFIX}{role.upper()}_"
    for variable, value in environ.items():
        # RADIXMESH_WORKER_GROUP of a service with a setting `worker_group` is no mistake of its worker role.
        if variable.startswith(role_prefix) and value and variable.removeprefix(PREFIX).lower() not in fields:
            yield variable, variable.removeprefix(role_prefix).lower(), value
    yield from ((f"--{name.replace('_', '-')}", name, value) for name, value in flags.items() if name in fields)


def _convert(value: Any, kind: Any, source: str) -> Any:
    wanted = types.type_info(kind)
    if isinstance(value, str) and isinstance(_bare(wanted), types.ListType | types.VarTupleType):
        value = [item.strip() for item in value.split(",") if item.strip()]
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        choices = _bare(wanted)
        if isinstance(choices, types.LiteralType):
            raise ConfigError(f"{source}: {value!r} is not one of {', '.join(map(str, choices.values))}") from None
        raise ConfigError(f"{source}: {value!r} does not fit: {error}") from None


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path!r} is not valid TOML: {error}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists all settings")


def _parser(kinds: Mapping[str, type[msgspec.Struct]]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m " + (f"services.{next(iter(kinds))}" if len(kinds) == 1 else f"services {' '.join(kinds)}"),
        epilog=f"Each setting can also stand in the TOML file or in the environment as {PREFIX}<NAME> "
        f"or {PREFIX}<ROLE>_<NAME>; a flag wins over both.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(f"--{_CONFIG_FLAG}", metavar="FILE", help=f"TOML file with settings ({PREFIX}CONFIG)")
    seen: set[str] = set()
    for role, kind in kinds.items():
        group = parser.add_argument_group(f"settings of the {role}")
        for field in types.type_info(kind).fields:  # type: ignore[attr-defined]
            if field.encode_name not in seen:
                seen.add(field.encode_name)
                _add_flag(group, field)
    return parser


def _add_flag(group: argparse._ArgumentGroup, field: types.Field) -> None:
    flag = "--" + field.encode_name.replace("_", "-")
    bare = _bare(field.type)
    text = _help(field, bare).replace("%", "%%")
    if isinstance(bare, types.BoolType):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif isinstance(bare, types.LiteralType):
        group.add_argument(flag, metavar="|".join(map(str, bare.values)), help=text)
    else:
        group.add_argument(flag, metavar=type(bare).__name__.removesuffix("Type").upper(), help=text)


def _help(field: types.Field, bare: types.Type) -> str:
    parts = []
    if isinstance(field.type, types.Metadata) and field.type.extra_json_schema:
        parts.append(field.type.extra_json_schema.get("description", ""))
    limits = [
        f"{sign} {limit}"
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if (limit := getattr(bare, name, None)) is not None
    ]
    if not field.required and field.default is not msgspec.NODEFAULT and field.default not in ("", None, ()):
        limits.insert(0, f"default {field.default}")
    if limits:
        parts.append(f"({', '.join(limits)})")
    return " ".join(parts)


def _bare(kind: types.Type) -> types.Type:
    """The type itself, without description and without `| None`."""
    if isinstance(kind, types.Metadata):
        return _bare(kind.type)
    if isinstance(kind, types.UnionType):
        others = [member for member in kind.types if not isinstance(member, types.NoneType)]
        if len(others) == 1:
            return _bare(others[0])
    return kind
