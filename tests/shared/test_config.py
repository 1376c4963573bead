"""Where settings come from, which source wins, and what a mistake says."""

from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta

from shared.config import ConfigError, ServiceConfig, load_config, load_configs


class BrainConfig(ServiceConfig, frozen=True, kw_only=True):
    max_prefill_tokens: Annotated[int, Meta(description="A step's token budget.", ge=1)] = 512
    overlap: Annotated[bool, Meta(description="Decide step N+1 while N runs.")] = True
    api_keys: Annotated[tuple[str, ...], Meta(description="Accepted keys.")] = ()
    worker_group: Annotated[str | None, Meta(description="Group to lead.")] = None

    def __post_init__(self) -> None:
        if self.worker_group == self.model:
            raise ValueError(f"worker_group {self.worker_group!r} must differ from model")


class MuscleConfig(ServiceConfig, frozen=True, kw_only=True):
    group: Annotated[str, Meta(description="Group of this worker.")] = "g0"


def load(*argv: str, **environ: str) -> BrainConfig:
    return load_config(BrainConfig, "scheduler", argv, environ)


def test_each_source_wins_over_those_below(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("max_prefill_tokens = 1\n[scheduler]\nmax_prefill_tokens = 2\n")
    sources = {
        "RADIXMESH_CONFIG": str(file),
        "RADIXMESH_MAX_PREFILL_TOKENS": "3",
        "RADIXMESH_SCHEDULER_MAX_PREFILL_TOKENS": "4",
    }
    assert load("--max-prefill-tokens", "5", **sources).max_prefill_tokens == 5
    assert load(**sources).max_prefill_tokens == 4
    del sources["RADIXMESH_SCHEDULER_MAX_PREFILL_TOKENS"]
    assert load(**sources).max_prefill_tokens == 3
    del sources["RADIXMESH_MAX_PREFILL_TOKENS"]
    assert load(**sources).max_prefill_tokens == 2
    file.write_text("max_prefill_tokens = 1\n")
    assert load("--config", str(file)).max_prefill_tokens == 1
    assert load().max_prefill_tokens == 512


def test_text_becomes_what_the_setting_is() -> None:
    config = load("--no-overlap", "--drain-timeout-s=1.5", RADIXMESH_API_KEYS="one, two", RADIXMESH_WORKER_GROUP="g1")
    assert config.overlap is False
    assert config.drain_timeout_s == 1.5
    assert config.api_keys == ("one", "two")
    assert config.worker_group == "g1"
    assert load(RADIXMESH_OVERLAP="false").overlap is False


def test_a_variable_set_to_nothing_counts_as_unset() -> None:
    assert load(RADIXMESH_MAX_PREFILL_TOKENS="").max_prefill_tokens == 512


@pytest.mark.parametrize(
    ("argv", "environ", "parts"),
    [
        (["--max-prefill-tokens", "0"], {}, ["--max-prefill-tokens", "'0'", ">= 1"]),
        (["--max-prefill-tokens", "many"], {}, ["--max-prefill-tokens", "'many'", "int"]),
        ([], {"RADIXMESH_MAX_PREFILL_TOKENS": "0"}, ["RADIXMESH_MAX_PREFILL_TOKENS", "'0'", ">= 1"]),
        (["--log-level", "loud"], {}, ["--log-level", "'loud'", "warning"]),
        (["--max-prefil-tokens", "3"], {}, ["--max-prefil-tokens", "--help"]),
        (["stray"], {}, ["stray"]),
        ([], {"RADIXMESH_SCHEDULER_OVERLAPP": "1"}, ["RADIXMESH_SCHEDULER_OVERLAPP", "'overlap'"]),
        (["--config", "/nowhere.toml"], {}, ["/nowhere.toml", "No such file"]),
        (["--worker-group", "smollm2-135m-instruct"], {}, ["worker_group", "must differ from model"]),
    ],
)
def test_a_mistake_names_the_setting_its_value_and_its_limit(
    argv: list[str], environ: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load(*argv, **environ)
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_misspelt_setting_in_the_roles_table_stops_the_start_but_other_roles_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("port = 8000\n[gateway]\nanything = 1\n")
    assert load("--config", str(file)).max_prefill_tokens == 512
    file.write_text("[scheduler]\nmax_prefill = 1\n")
    with pytest.raises(ConfigError, match=r"\[scheduler\] max_prefill.*did you mean 'max_prefill_tokens'"):
        load("--config", str(file))
    file.write_text("not toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load("--config", str(file))
    file.write_text("scheduler = 3")
    with pytest.raises(ConfigError, match="must be a table"):
        load("--config", str(file))


def test_in_a_shared_process_a_flag_goes_to_those_who_know_it() -> None:
    kinds: dict[str, type[ServiceConfig]] = {"scheduler": BrainConfig, "worker": MuscleConfig}
    configs = load_configs(kinds, ["--group", "g7", "--model", "m", "--max-prefill-tokens", "9"], {})
    brain, muscle = configs["scheduler"], configs["worker"]
    assert isinstance(brain, BrainConfig)
    assert isinstance(muscle, MuscleConfig)
    assert (brain.model, brain.max_prefill_tokens) == ("m", 9)
    assert (muscle.model, muscle.group) == ("m", "g7")
    with pytest.raises(ConfigError, match="--nobodys"):
        load_configs(kinds, ["--nobodys", "1"], {})


def test_a_variable_that_reads_both_ways_belongs_to_the_service_that_knows_it() -> None:
    environ = {"RADIXMESH_WORKER_GROUP": "g1"}
    assert load(**environ).worker_group == "g1"
    assert load_config(MuscleConfig, "worker", [], environ).group == "g1"


def test_help_explains_every_setting_with_default_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load("--help")
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "--max-prefill-tokens INT",
        "A step's token budget. (default 512, >= 1)",
        "--no-overlap",
        "RADIXMESH_",
    ):
        assert part in text
    assert all(f"--{name.replace('_', '-')}" in text for name in BrainConfig.__struct_fields__)
