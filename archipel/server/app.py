"""Makes the web application: the API with one blueprint per resource, pages, and the dashboard."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flask import Flask
from werkzeug.middleware.proxy_fix import ProxyFix

from archipel.server import dashboard
from archipel.server.http import cross_origin, documentation, pages, problems, request_log
from archipel.server.http.api import ROUTES
from archipel.server.http.auth import Authenticator
from archipel.server.http.door import Door
from archipel.server.http.request_limits import RequestLimits
from archipel.server.http.request_measures import RequestMeasures
from archipel.server.http.routes import CONVERTERS, blueprint
from archipel.server.services import Clock, Services
from archipel.server.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from archipel.server.telemetry.measures import Measures


def create_app(
    settings: Settings,
    *,
    clock: Clock = time.time,
    demo_page: Path = pages.PAGE_FOLDER,
    docs_page: Path = documentation.DOCS_FOLDER,
    measures: Measures | None = None,
    draining: Callable[[], bool] = lambda: False,
) -> Flask:
    """Make the WSGI application. It has no state of its own: any number of processes may serve one data folder.

    Arguments:
        settings: The server's settings. The database must have the current schema (`Services.prepare`).
        clock: Gives Unix seconds.
        demo_page: The folder of the built browser demo, served at /demo/ with the setting `demo`.
        docs_page: The folder of the built documentation, served at /docs/ with the setting `docs`.
        measures: Where requests, database and files are measured.
        draining: Whether the server is about to stop, so that nobody should send it further requests.

    Raises:
        ServerError: The database, the server key or the request log cannot be used.

    Example:
        app = create_app(load_settings("server"))  # for a WSGI server of your own
    """
    services = Services.open(settings, connections=settings.threads, clock=clock, measures=measures, draining=draining)
    services.database.check()
    settings.private_key  # noqa: B018 - an unreadable key fails now, and not in the first request
    app = Flask("archipel.server", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = settings.max_json_bytes
    app.extensions["archipel"] = services
    app.url_map.converters.update(CONVERTERS)
    problems.register(app, dashboard.answer_problem)
    measured = None if measures is None else RequestMeasures(measures)
    request_log.register(app, settings, measured, services.tracer, services.fetched)
    if settings.trusted_proxies:
        # Only the client's address is taken from the proxies' headers, because the request limits need it.
        app.wsgi_app = ProxyFix(  # type: ignore[method-assign]
            app.wsgi_app, x_for=settings.trusted_proxies, x_proto=0, x_host=0, x_port=0, x_prefix=0
        )
    app.wsgi_app = _bounded(app.wsgi_app, services)  # type: ignore[method-assign, assignment]
    door = Door(services, Authenticator(services), RequestLimits(settings))
    stall = settings.stall_seconds
    people = pages.routes(
        demo_page, resources=ROUTES, demo=settings.demo, docs=settings.docs, docs_folder=docs_page, stall_seconds=stall
    )
    for name, routes in {**ROUTES, "pages": people}.items():
        app.register_blueprint(blueprint(name, routes, door))
    dashboard.register(app, door)
    named = ((f"{name}.{route.name}", route) for name, routes in ROUTES.items() for route in routes)
    cross_origin.register(app, settings.allowed_origins, named)
    return app


def _bounded(application: WSGIApplication, services: Services) -> WSGIApplication:
    """Works on as many requests at once as the settings say; there are more threads than that, for held check-ins."""

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with services.held.places:
            return application(environ, start_response)

    return serve
