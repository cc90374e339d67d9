"""The api's README names every route, setting and error code."""

from __future__ import annotations

import re
from pathlib import Path

from surefoot_api.handlers import API, health, router
from surefoot_api.settings import ApiSettings

SERVICE = Path(__file__).parents[2] / "services" / "api"
README = (SERVICE / "README.md").read_text()


def test_settings() -> None:
    for name, field in ApiSettings.model_fields.items():
        assert f"SUREFOOT_{name.upper()}" in README
        assert field.description
    for default in ("127.0.0.1", "8470", "true", "64"):
        assert f"`{default}`" in README


def test_routes() -> None:
    for route in [*router.routes, *health.routes]:
        path = route.path.removeprefix(API)
        short = "/" + path.rsplit("/", 1)[-1]
        assert f"{next(iter(route.methods))} {path}`" in README or f"`{short}`" in README, path


def test_error_codes() -> None:
    sources = "".join(path.read_text() for path in SERVICE.glob("src/**/*.py"))
    codes = set(re.findall(r'(?:ProblemError|problem)\(\s*\d{3},\s*"([a-z_]+)"', sources))
    assert len(codes) > 12
    made = {"bus_unavailable", "catalogue_unavailable", "job_not_found", "not_found", "method_not_allowed"}
    for code in codes | made:
        assert f"`{code}`" in README, code
