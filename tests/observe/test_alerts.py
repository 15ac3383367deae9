"""Alert rules and dashboard: valid, and every metric that they read is exported."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dynamictp.cli import cli
from dynamictp.observe.grafana import ROWS, dashboard, metrics_in, queries
from dynamictp.server.metrics import Metrics


def exported() -> set[str]:
    """Names of series, as Prometheus stores them."""
    names: set[str] = set()
    for family in Metrics().collect():
        match family.type:
            case "counter":
                names.add(f"{family.name}_total")
            case "histogram":
                names |= {family.name + suffix for suffix in ("_bucket", "_sum", "_count")}
            case _:
                names.add(family.name)
    return names


def rules() -> Iterator[dict[str, Any]]:
    text = (resources.files("dynamictp.observe") / "data" / "alerts.yml").read_text()
    for group in yaml.safe_load(text)["groups"]:
        yield from group["rules"]


def test_alerts_read_metrics_that_are_exported_and_say_what_to_do() -> None:
    known = exported()
    for rule in rules():
        assert metrics_in(rule["expr"]) <= known, rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_every_alert_has_a_unit_test_in_which_it_fires() -> None:
    text = (resources.files("dynamictp.observe") / "data" / "alerts_test.yml").read_text()
    fired = {
        test["alertname"]
        for situation in yaml.safe_load(text)["tests"]
        for test in situation["alert_rule_test"]
        if test["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules()}


def test_the_dashboard_reads_metrics_that_are_exported() -> None:
    known = exported()
    assert [query for query in queries() if not metrics_in(query) or not metrics_in(query) <= known] == []


def test_the_dashboard_is_laid_out_without_overlaps() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] == "timeseries"]
    assert len(panels) == sum(len(row) for _, row in ROWS)
    cells = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(cells)) == len(cells)
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    assert all("@" not in target["expr"] for panel in panels for target in panel["targets"])


def test_exports_are_what_the_tools_import(tmp_path: Path) -> None:
    runner = CliRunner()
    assert json.loads(runner.invoke(cli, ["export", "grafana"]).output) == dashboard()
    assert yaml.safe_load(runner.invoke(cli, ["export", "alerts"]).output)["groups"]


def test_promtool_agrees(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    runner = CliRunner()
    for what, name in (("alerts", "alerts.yml"), ("alert-tests", "alerts_test.yml")):
        (tmp_path / name).write_text(runner.invoke(cli, ["export", what]).output)
    # The dashboard's queries, as rules, so that the same program reads them.
    plain = [query.replace("$instance", ".*").replace("$__rate_interval", "1m") for query in queries()]
    recorded = [{"record": f"panel:{index}", "expr": expr} for index, expr in enumerate(plain)]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": recorded}]}))
    for command in (
        ["check", "rules", "panels.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ):
        ran = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
