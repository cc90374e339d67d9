"""The gateway's README has every metric, as the table in the code says, and every setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from surefoot_gateway.settings import GatewaySettings
from surefoot_gateway.table import METRICS, Metric

README = (Path(__file__).parents[2] / "services" / "gateway" / "README.md").read_text()


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_is_in_the_readme_as_it_is(metric: Metric) -> None:
    assert metric.row in README.splitlines()


def test_no_metric_of_the_readme_is_gone() -> None:
    in_table = re.findall(r"^\| `(surefoot_\w+)` \| (?:counter|gauge|histogram) ", README, re.MULTILINE)
    assert in_table == [metric.name for metric in METRICS]
    named = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bsurefoot_[a-z_]+", README)}
    assert named <= {metric.name for metric in METRICS}


def test_every_setting_is_in_the_readme_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(SUREFOOT_\w+)` \| `([^`]*)` ", README, re.MULTILINE))
    fields = {f"SUREFOOT_{name.upper()}": str(field.default) for name, field in GatewaySettings.model_fields.items()}
    not_used = {"SUREFOOT_DATABASE_URL"}
    assert rows == {name: default for name, default in fields.items() if name not in not_used}
