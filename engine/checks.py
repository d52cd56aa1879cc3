"""Checks of what the fields of a configuration hold: a wrong value is one line that names the field. No torch."""

from __future__ import annotations

from saggar.engine.errors import Unsupported

_LONGEST_SHOWN = 40


def check_count(name: str, value: object, least: int = 1, *, or_none: bool = False) -> None:
    """A whole number from `least` on. Raises Unsupported."""
    also = " or None" if or_none else ""
    if or_none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unsupported(f"{name} must be an integer{also}, not {_shown(value)}")
    if value < least:
        raise Unsupported(
            f"{name} must be {f'at least {least}' if least else '0 or more'}{also}, not {value}"
        )


def check_number(name: str, value: object, *, above: bool = False) -> None:
    """A number from 0 on, or `above` it; infinity is one, NaN is none. Raises Unsupported."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unsupported(f"{name} must be a number, not {_shown(value)}")
    if not (value > 0 if above else value >= 0):
        raise Unsupported(f"{name} must be {'above 0' if above else '0 or more'}, not {value}")


def check_kind(name: str, value: object, kind: type, said: str) -> None:
    """A value of this class, which `said` describes: "true or false". Raises Unsupported."""
    if not isinstance(value, kind):
        raise Unsupported(f"{name} must be {said}, not {_shown(value)}")


def host_and_port(address: str) -> tuple[str, int]:
    """Of `host:port`; an IPv6 host stands in brackets, and comes without. Raises ValueError, which says so."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port[:6]) < 65536:
        raise ValueError("is no address (allowed: host:port)")
    return host, int(port)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"a {type(value).__name__}"
