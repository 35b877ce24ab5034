"""The probe of the network: whether its use is paid for by the byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

from archipel.client.conditions.probes.readings import need_linux, read_text
from archipel.errors import ClientError

METERED_INTERFACES = ("wwan*", "ppp*", "rmnet*", "usb*", "bnep*")
"""Mobile broadband, dial-up, and phones on a cable or on Bluetooth."""

_UP, _REJECT = 0x1, 0x200  # RTF_UP and RTF_REJECT of linux/route.h, linux/ipv6_route.h
_HEX = re.compile(r"[0-9A-Fa-f]+")
_INTERFACE = re.compile(r"(?!\.\.?$)[!-.0-~]{1,64}")


@dataclass(frozen=True)
class Unmetered:
    """Holds while the default routes of IPv4 and IPv6 lead to interfaces that are not metered.

    An interface is metered if its name matches one of `metered_interfaces` (as in a shell) or if the kernel calls it a
    mobile modem. Of several default routes those with the lowest metric count. The probe cannot see what lies behind an
    interface, such as a phone's access point on WLAN or the link below a VPN: name such interfaces.
    """

    metered_interfaces: tuple[str, ...] = METERED_INTERFACES
    root: Path = Path("/")
    name: ClassVar[str] = "unmetered"

    def __post_init__(self) -> None:
        need_linux("unmetered")
        patterns = self.metered_interfaces
        if isinstance(patterns, str) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise ClientError(f'metered_interfaces must be a list of names such as ["wwan*"], is {patterns!r}')

    def why_not(self) -> str:
        interfaces = self._interfaces()
        if not interfaces:
            return "no network (there is no default route)"
        metered = [name for name in interfaces if self._is_metered(name)]
        return f"the network is metered: {', '.join(metered)} (setting unmetered)" if metered else ""

    def value(self) -> bool:
        return not self.why_not()

    def _interfaces(self) -> list[str]:
        proc = self.root / "proc/net"
        interfaces = _lowest_metric_interfaces(proc / "route", _ipv4_route)
        if (proc / "ipv6_route").exists():
            interfaces |= _lowest_metric_interfaces(proc / "ipv6_route", _ipv6_route)
        return sorted(interfaces)

    def _is_metered(self, interface: str) -> bool:
        if any(fnmatchcase(interface, pattern) for pattern in self.metered_interfaces):
            return True
        path = self.root / "sys/class/net" / interface / "uevent"
        return path.exists() and "DEVTYPE=wwan" in read_text(path).splitlines()


def _lowest_metric_interfaces(path: Path, parse: Callable[[list[str]], tuple[str, int] | None]) -> set[str]:
    """The interfaces of the default routes with the lowest metric, which the kernel prefers."""
    metrics: dict[str, int] = {}
    for line in read_text(path).splitlines():
        try:
            route = parse(line.split())
        except (ValueError, IndexError):
            raise ClientError(f"{path} has {line[:40]!r} where a route is expected") from None
        if route is not None:
            name, metric = route
            if not _INTERFACE.fullmatch(name):
                raise ClientError(f"{path} has {name[:40]!r} where an interface is expected")
            metrics[name] = min(metric, metrics.get(name, metric))
    return {name for name, metric in metrics.items() if metric == min(metrics.values())}


def _ipv4_route(fields: list[str]) -> tuple[str, int] | None:
    # Columns: Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
    if fields[0] == "Iface":
        return None
    destination, flags, mask = _hex(fields[1], 8), _hex(fields[3], 4), _hex(fields[7], 8)
    # A reject route (RTF_REJECT, "unreachable default") leads nowhere.
    default = destination == mask == 0 and flags & _UP and not flags & _REJECT
    return (fields[0], int(fields[6])) if default else None


def _ipv6_route(fields: list[str]) -> tuple[str, int] | None:
    # Columns: destination, length, source, length, next hop, metric, references, use, flags, interface
    destination, length, flags = _hex(fields[0], 32), _hex(fields[1], 2), _hex(fields[8], 8)
    default = destination == length == 0 and flags & _UP and not flags & _REJECT
    return (fields[9], _hex(fields[5], 8)) if default else None


def _hex(field: str, digits: int) -> int:
    if len(field) != digits or not _HEX.fullmatch(field):
        raise ValueError(field)
    return int(field, 16)
