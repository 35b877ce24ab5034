"""Somebody on the way reads what goes over plain http://.

Who: whoever can listen between a device, or an operator, and the server. What they want: the operator's token, which
starts tasks, or a device's session, in whose name they speak. What stops them: plain http:// is for this very machine;
anywhere else it takes an explicit setting.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from archipel.client import Agent, AgentConfig
from archipel.errors import ClientError
from archipel.operator import OperatorClient
from archipel.protocol.address import check_url
from tests.support.fixtures.commands import archipel  # noqa: F401
from tests.support.scripted_server import scripted

ELSEWHERE = (
    "http://federation.example", "http://10.0.0.7:8470", "http://localhost.evil.example", "http://127.0.0.1.evil.example",
    "http://[2001:db8::1]:80", "http://0.0.0.0:8470", "http://2130706433", "http://LOCALHOST.",
)  # fmt: skip
HERE = (
    "http://127.0.0.1:8470", "http://127.8.9.10", "http://[::1]:8470", "http://localhost:8470", "http://LOCALHOST",
    "https://federation.example", "https://10.0.0.7:8443",
)  # fmt: skip


@pytest.mark.parametrize("url", ELSEWHERE)
def test_elsewhere_it_takes_a_setting(url: str, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"plain http:// to .*use https://, or set allow_http"):
        check_url(url)
    with pytest.raises(ClientError, match="plain http://"):
        AgentConfig(folder=tmp_path, server=url)
    with pytest.raises(ClientError, match="plain http://"):
        OperatorClient(url, "t" * 43)
    check_url(url, allow_http=True)
    AgentConfig(folder=tmp_path, server=url, allow_http=True)
    OperatorClient(url, "t" * 43, allow_http=True).close()


@pytest.mark.parametrize("url", HERE)
def test_this_machine_and_tls_need_none(url: str) -> None:
    check_url(url)


def test_a_token_of_such_a_server_sends_nothing(tmp_path: Path) -> None:
    """The address may come with the enrolment token instead of the settings."""
    import msgspec

    with scripted(tmp_path) as server:
        token = msgspec.structs.replace(server.token(), server="http://federation.example:8470")
        with Agent(AgentConfig(folder=tmp_path / "device"), examples=dict) as agent:
            with pytest.raises(ClientError, match=r"plain http:// to federation\.example"):
                agent.enrol(token)
            assert agent.device_id == ""


@pytest.mark.sampled(every=3)
def test_the_operators_token_stays_here(
    archipel: Callable[..., tuple[str, str]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("ARCHIPEL_TOKEN", "t" * 43)
    there: dict[str, int] = {"code": 1}
    _, err = archipel("task", "list", "--server", "http://federation.example", **there)
    assert err.startswith("archipel: --server or ARCHIPEL_SERVER: plain http:// to federation.example")
    # With it the address is taken: what fails is the connection, in a network without that name.
    monkeypatch.setenv("ARCHIPEL_ALLOW_HTTP", "1")
    _, err = archipel("task", "show", "a" * 32, "--server", "http://0.0.0.0:1", **there)
    assert "plain http://" not in err
