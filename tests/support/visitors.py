"""Somebody who uses the dashboard of a server in this process, as a browser does, but without scripts."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from tests.support.world import World

CSRF = re.compile(r'name="csrf" value="([^"]+)"')
KEY = re.compile(r'name="key" value="([^"]+)"')
HERE = "http://localhost"


class Visitor:
    """A browser's cookies. `base` is the address that it has opened; its forms say that they come from there."""

    def __init__(self, world: World, token: str | None = None, *, base: str = HERE) -> None:
        self.world, self.base = world, base
        self.client: FlaskClient = world.app.test_client()
        if token is not None:
            assert self.log_in(token).status_code == 303

    def get(self, path: str, **headers: str) -> TestResponse:
        return self.client.get(path, base_url=self.base, headers=headers)

    def page(self, path: str) -> str:
        """The HTML of a page that is there."""
        answer = self.get(path)
        assert answer.status_code == 200, (path, answer.status_code, answer.get_data(as_text=True)[-1500:])
        return answer.get_data(as_text=True)

    def words(self, path: str) -> str:
        """What a page says, without its tags."""
        return " ".join(unescape(re.sub(r"<[^>]+>", " ", self.page(path))).split())

    def send(self, path: str, form: dict[str, Any], **headers: str) -> TestResponse:
        """Send a form as it is."""
        return self.client.post(path, base_url=self.base, data=form, headers={"Origin": self.base, **headers})

    def log_in(self, token: str, **form: str) -> TestResponse:
        return self.send("/dashboard/login", {"token": token, **form})

    @property
    def csrf(self) -> str:
        """What this session's forms carry."""
        found = CSRF.search(self.page("/dashboard/"))
        assert found is not None
        return found[1]

    def post(self, path: str, **form: Any) -> TestResponse:
        """Send a form of this session."""
        return self.send(path, {"csrf": self.csrf, **form})

    def do(self, path: str, **form: Any) -> str:
        """Open the page that asks for something, say yes, and return what the next page says."""
        asked = self.page(path)
        csrf, key = CSRF.search(asked), KEY.search(asked)
        assert csrf is not None
        fields = {"csrf": csrf[1], **({} if key is None else {"key": key[1]}), **form}
        answer = self.send(path, fields)
        assert answer.status_code == 303, (path, answer.status_code, answer.get_data(as_text=True)[-1500:])
        return self.words(answer.headers["Location"])


def access_token(world: World, role: str, **settings: Any) -> tuple[str, str]:
    """A new access token and its id."""
    status, made = world.operator("POST", "/v1/tokens", {"name": "test", "role": role, **settings})
    assert status == 201, made
    return made["token"], made["info"]["token_id"]


def fill(visitor: Visitor, path: str, **form: Any) -> str:
    """Fill a form in, say yes to the page that shows what will be made, and return the new thing's path."""
    values = {"csrf": visitor.csrf, **form}
    asked = visitor.send(path, values)
    html = asked.get_data(as_text=True)
    assert asked.status_code == 200, html[-1500:]
    key = KEY.search(html)
    assert key is not None, html[-1500:]
    made = visitor.send(path, {**values, "key": key[1], "sure": "yes"})
    assert made.status_code == 303, made.get_data(as_text=True)[-2500:]
    return str(made.headers["Location"])
