"""What the README shows is what the code does."""

import re
from pathlib import Path

from click.testing import CliRunner

from radixmesh.command.serve import settings_command
from radixmesh.models.registry import DEFAULT_MODEL

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_table_of_settings_is_the_codes():
    table = CliRunner().invoke(settings_command, ["--markdown"]).output
    shown = re.search(r"<!-- settings: .*? -->\n(.*?)<!-- end of settings -->", README, re.DOTALL)
    assert shown is not None
    assert shown[1] == table, "renew the table with `radixmesh settings --markdown`"


def test_the_examples_name_the_default_model():
    assert README.count(DEFAULT_MODEL) >= 2
