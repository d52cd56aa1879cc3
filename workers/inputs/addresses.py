"""Which addresses a worker connects to. A name is resolved once, and the connection goes to the address that was
checked: a name that answers differently a moment later (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import TypeAlias

from saggar.workers.inputs.bad import BadInput

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve: TypeAlias = Callable[[str, int], list[str]]

_BROADCAST = ipaddress.IPv4Address("255.255.255.255")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST6 = ipaddress.ip_network("2000::/3")
"""All that IANA has given out. The rest holds old ways to write an IPv4 address, which `is_global` takes for public."""
_METADATA = frozenset(
    map(ipaddress.ip_address, ("168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
"""Where clouds keep their credentials beside the link-local 169.254.169.254: Azure, Oracle, AWS and Google by IPv6."""
_NEVER_ALLOWED = "hosts with a public address"


def resolve(host: str, port: int) -> list[str]:
    """The host's addresses in the system's order, as numbers. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(entry[4][0]) for entry in found]


def allowed_address(host: str, addresses: list[str], *, private: bool) -> str:
    """The first address that may be connected to; `private`: also one of a private network or of this machine.

    Raises BadInput when there is none. Those where clouds keep their credentials, link-local and others, never are.
    """
    for text in addresses:
        if _may(ipaddress.ip_address(text.partition("%")[0]), private):
            return text
    allowed = _NEVER_ALLOWED if private else f"{_NEVER_ALLOWED}, or those that the worker names as private"
    raise BadInput(f"the host {host[:100]} has no address that may be connected to", allowed)


def _may(address: Address, private: bool) -> bool:
    inner = _inner(address)
    if inner is not None:
        return _may(inner, private)
    if address.is_link_local or address.is_multicast or address.is_unspecified or address == _BROADCAST:
        return False
    if address in _METADATA:
        return False
    if address.is_global:
        return address.version == 4 or address in _UNICAST6
    return private and (address.is_private or address.is_loopback)


def _inner(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one leads to."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
