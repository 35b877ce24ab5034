"""Default routes as the kernel lists them, and what is metered."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from archipel.client.conditions.probes.network import METERED_INTERFACES, Unmetered
from archipel.errors import ClientError

Tree = Callable[..., Path]
HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"
NONE6 = f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} ffffffff 00000001 00000000 00200200       lo"


def route(interface: str, metric: int = 100, destination: str = "00000000", mask: str = "00000000",
          flags: str = "0003") -> str:  # fmt: skip
    return f"{interface}\t{destination}\t010200C0\t{flags}\t0\t0\t{metric}\t{mask}\t0\t0\t0      "


def route6(interface: str, metric: int = 1024, prefix: str = "00", flags: str = "00000003") -> str:
    return f"{'0' * 32} {prefix} {'0' * 32} 00 fe80{'0' * 27}1 {metric:08x} 00000003 00000000 {flags}     {interface}"


def table(*routes: str, six: tuple[str, ...] | None = (NONE6,)) -> dict[str, str]:
    files = {"proc/net/route": "\n".join([HEAD, *routes])}
    return files if six is None else {**files, "proc/net/ipv6_route": "\n".join(six)}


LAN = route("eth0", 0, destination="000200C0", mask="00FFFFFF", flags="0001")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (table(route("eth0"), LAN), ""),
        (table(route("eth0"), six=None), ""),  # a kernel without IPv6
        (table(route("wwan0")), "the network is metered: wwan0 (setting unmetered)"),
        (table(route("eth0", 100), route("wwan0", 700)), ""),
        (table(route("eth0", 700), route("wwan0", 100)), "the network is metered: wwan0 (setting unmetered)"),
        (table(route("eth0"), route("usb0")), "the network is metered: usb0 (setting unmetered)"),  # either
        (table(six=(NONE6, route6("eth0"))), ""),
        (table(route("eth0"), six=(route6("rmnet_data0"),)), "the network is metered: rmnet_data0 (setting unmetered)"),
        (table(route("wlan0"), six=(route6("wlan0", 600), route6("ppp0", 700))), ""),
        (table(LAN), "no network (there is no default route)"),
        (table(), "no network (there is no default route)"),
        (table(route("eth0", flags="0002")), "no network (there is no default route)"),  # not up
        (table(route("eth0", flags="0203")), "no network (there is no default route)"),  # rejects
        (table(six=(route6("eth0", flags="00200200"),)), "no network (there is no default route)"),
        (table(six=(route6("eth0", prefix="40"),)), "no network (there is no default route)"),
        # 0.0.0.0/1, half of what a VPN adds, is not the default route
        (table(route("tun0", 0, mask="00000080"), route("eth0")), ""),
    ],
)
def test_default_routes(tree: Tree, files: dict[str, str], reason: str) -> None:
    probe = Unmetered(root=tree(files))
    assert probe.why_not() == reason
    assert probe.value() is (reason == "")


def test_which_interfaces_are_metered(tree: Tree) -> None:
    root = tree({**table(route("wlan0")), "sys/class/net/wlan0/uevent": "DEVTYPE=wlan\nINTERFACE=wlan0\nIFINDEX=3"})
    assert Unmetered(root=root).why_not() == ""
    assert Unmetered((*METERED_INTERFACES, "wlan*"), root).why_not() == (
        "the network is metered: wlan0 (setting unmetered)"
    )
    tree({**table(route("wlp3s0")), "sys/class/net/wlp3s0/uevent": "DEVTYPE=wwan\nINTERFACE=wlp3s0"})
    assert "metered: wlp3s0" in Unmetered((), root).why_not()
    tree({"sys/class/net/wlp3s0/uevent": "NODEVTYPE=wwan\nDEVTYPE=wwan2"})
    assert Unmetered((), root).why_not() == ""


@pytest.mark.parametrize("wrong", ["wwan*", ("",), (3,)])
def test_what_is_no_list_of_names(wrong: object) -> None:
    with pytest.raises(ClientError, match=r"metered_interfaces must be a list of names such as \[\"wwan\*\"\]"):
        Unmetered(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        "eth0",
        route("eth0", destination="0"),
        route("eth0", flags="xx03"),
        route("eth0", mask="0x000000"),
        route("eth0").replace("100", "ten"),
        route("../../../etc"),
        route(".."),
        route("e" * 65),
    ],
)
def test_a_table_that_cannot_be_right(tree: Tree, line: str) -> None:
    with pytest.raises(ClientError, match=r"proc/net/route has .* where (a route|an interface) is expected"):
        Unmetered(root=tree(table(line))).why_not()
    with pytest.raises(ClientError, match=r"proc/net/ipv6_route has .* where (a route|an interface) is expected"):
        Unmetered(root=tree(table(six=(line,)))).why_not()


def test_this_machine() -> None:
    """The kernel itself says from which address it would send."""
    probe = Unmetered(())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        try:
            udp.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            assert not any(line.endswith("eth0") for line in probe._interfaces())
            return
        address = udp.getsockname()[0]
    owners = {name for name, found in psutil.net_if_addrs().items() if address in {one.address for one in found}}
    assert owners & set(probe._interfaces())
    metered = Unmetered(tuple(owners))
    assert metered.why_not().startswith("the network is metered: ")
