"""Two populations on one server over HTTP: their operators, their devices, and whatever they ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import urllib3

from archipel.client import Agent
from archipel.protocol.operator.access import AccessRole, TokenRequest
from tests.support.federation import Federation


@dataclass(frozen=True)
class Caller:
    """Somebody with a bearer token."""

    url: str
    token: str

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and body, decoded where it is JSON."""
        data = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        answer = urllib3.request(method, self.url + path, body=data, headers=headers, retries=False)
        parsed = answer.data[:1] in (b"{", b"[")
        return answer.status, msgspec.json.decode(answer.data) if parsed else answer.data


def person(federation: Federation, *populations: str, role: AccessRole = "operator") -> Caller:
    """An operator or auditor of these populations alone."""
    made = federation.operator.tokens.create(TokenRequest(name="bound", role=role, populations=list(populations)))
    return Caller(federation.url, made.token)


def device(federation: Federation, number: int, population: str) -> tuple[Agent, Caller]:
    """An enrolled agent of that population, and whoever has its session token."""
    agent = federation.agent(number, enrol=False)
    agent.enrol(federation.token(population=population))
    agent.run_once()
    assert agent._session is not None
    return agent, Caller(federation.url, agent._session._token)
