"""What `radixmesh serve` can be told: its own settings, and every setting of every service.

Nothing is listed twice: flags, help and the reference table are read from the services' own config Structs, and values are
checked by the code that the services use. A child process then gets its settings in the environment, each one resolved.
"""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from radixmesh.errors import UsageError
from radixmesh.models.registry import DEFAULT_MODEL
from shared.config import PREFIX, ConfigError, ServiceConfig, load_configs

SERVE = "serve"
ROLES = ("gateway", "tokenizer", "grammar", "router", "scheduler", "worker")
_DECIDED_BY_SERVE = ("model", "model_path", "nats_url", "instance", "drain_timeout_s")
"""Settings that every service has and that `serve` fills in."""
_LIMITS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the command itself; those of the services come on top."""

    model: Annotated[
        str,
        Meta(min_length=1, description="Name from `radixmesh models list`, folder, GGUF file, or hub id (org/name)."),
    ] = DEFAULT_MODEL
    served_model_name: Annotated[str, Meta(description="The model's id over HTTP; made from --model when empty.")] = ""
    replicas: Annotated[
        int, Meta(ge=1, le=64, description="Engines (a scheduler and a worker each) behind the router.")
    ] = 1
    nats_url: Annotated[str, Meta(description="NATS server to use; when empty, one is started.")] = ""
    nats_port: Annotated[
        int, Meta(ge=0, le=65535, description="Loopback port of the NATS server that is started; 0: any free one.")
    ] = 0
    start_timeout_s: Annotated[float, Meta(gt=0, description="Give up when not ready after this long.")] = 600.0
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, description="When told to stop, finish running requests for this long; Ctrl-C ends all within 5 s."),
    ] = 2.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as people see it."""

    name: str
    roles: tuple[str, ...]
    description: str
    default: Any
    kind: str
    """JSON's name of its type (string, integer, number, boolean, array), or the values it can take: `json|pretty`"""
    limits: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


@cache
def config_types() -> Mapping[str, type[msgspec.Struct]]:
    """By role, `serve` first. The config modules are light: none imports what its service computes with."""
    kinds: dict[str, type[msgspec.Struct]] = {SERVE: ServeConfig}
    for role in ROLES:
        kinds[role] = getattr(importlib.import_module(f"services.{role}.config"), f"{role.title()}Config")
    return kinds


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting once; where several services have one of the same name, the first description stands for all."""
    found: dict[str, Setting] = {}
    for role, kind in config_types().items():
        schema = msgspec.json.schema_components([kind])[1][kind.__name__]
        for name, field in schema["properties"].items():
            if role != SERVE and name in _DECIDED_BY_SERVE:
                continue
            if name in found:
                found[name] = dataclasses.replace(found[name], roles=(*found[name].roles, role))
            else:
                found[name] = _setting(name, role, field)
    return tuple(found.values())


def _setting(name: str, role: str, field: Mapping[str, Any]) -> Setting:
    # An optional setting is described beside `anyOf`, its type stands in there.
    variants = [variant for variant in field.get("anyOf", [field]) if variant.get("type") != "null"]
    variant = variants[0]
    return Setting(
        name=name,
        roles=(role,),
        description=field.get("description", ""),
        default=field.get("default"),
        kind="|".join(map(str, variant["enum"])) if "enum" in variant else variant["type"],
        limits=tuple(f"{sign} {variant[key]}" for key, sign in _LIMITS.items() if key in variant),
    )


@dataclass(frozen=True, slots=True)
class Settings:
    serve: ServeConfig
    services: Mapping[str, ServiceConfig]
    """By role."""


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Flags, environment and TOML file, each value checked. Raises UsageError that names the setting."""
    try:
        loaded = load_configs(config_types(), argv, environ)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    serve = cast(ServeConfig, loaded.pop(SERVE))
    return Settings(serve, cast(dict[str, ServiceConfig], loaded))


def child_environ(configs: Mapping[str, ServiceConfig], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a process resolves exactly `configs`, whatever file and variables we were given."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    for role, config in configs.items():
        for field in msgspec.structs.fields(config):
            value = getattr(config, field.name)
            if value != field.default:
                kept[f"{PREFIX}{role.upper()}_{field.name.upper()}"] = _as_text(value)
    return kept


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
