"""The web application, put together."""

from __future__ import annotations

from fastapi import FastAPI

from surefoot import __version__
from surefoot_api import problems
from surefoot_api.audit import Audit
from surefoot_api.following import Follower
from surefoot_api.guard import Guard
from surefoot_api.handlers import API, health, router
from surefoot_api.parts import Parts


def make_app(parts: Parts) -> FastAPI:
    """Return the application; connects to nothing.

    Args:
        parts: What its routes work with.
    """
    # FastAPI's pages of documentation load scripts from elsewhere; the description itself is served.
    app = FastAPI(
        title="Surefoot", version=__version__, openapi_url=f"{API}/openapi.json", docs_url=None, redoc_url=None
    )
    app.state.parts = parts
    app.state.follower = Follower(parts.bus, parts.stopping, parts.settings.api_max_streams)
    app.include_router(router)
    app.include_router(health)
    problems.install(app)
    app.add_middleware(Guard, token=parts.settings.token, audit=Audit(parts.database))
    return app
