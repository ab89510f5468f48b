# SPDX-License-Identifier: BSD-3-Clause
"""Which address to advertise, and what the interfaces of this machine have.

Rules of this file: the address is chosen by a stated order, never guessed from the host name; a name is
looked up once, and from then on only numeric addresses are used; IPv6 may be missing; the environment is read
when a function is called, never at import.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ._net import Candidate, family_of, ip_of, lookup_once, numeric_ip, sockaddr_of, with_zone

try:
    import fcntl
except ImportError:  # Windows has none; interface_addresses() then knows names only
    fcntl = None  # type: ignore[assignment]

__all__ = ["Address", "choose_address", "interface_addresses"]

_logger = logging.getLogger(__name__)

# Documentation addresses (RFC 5737, RFC 3849): nobody's, so only the default route leads there.
_FAR_AWAY = ("203.0.113.1", "2001:db8::1")
_PROBE_PORT = 9  # "discard"; a UDP connect sends nothing, so any port but 0 will do

# Linux only, from linux/sockios.h, linux/if.h and linux/if_addr.h; Python has no names for them.
_SIOCGIFFLAGS, _SIOCGIFADDR, _IFF_UP = 0x8913, 0x8915, 0x1
_TEMPORARY, _OPTIMISTIC, _DADFAILED, _DEPRECATED, _TENTATIVE = 0x01, 0x04, 0x08, 0x20, 0x40
_SCOPE_LINK = 0x20


@dataclass(frozen=True)
class Address:
    """A numeric address to advertise, and why this one.

    ``ip`` is v4 or v6, a link-local v6 with its ``%interface``; ``family`` is ``socket.AF_INET`` or
    ``AF_INET6``; ``why`` is a short phrase for the log.
    """

    ip: str
    family: int
    why: str

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return _is_loopback(self.ip)


def choose_address(
    host: str | None = None, interface: str | None = None, environ: Mapping[str, str] | None = None
) -> Address:
    """Choose the address to bind and to advertise.

    The first that applies: ``host`` or ``interface``; FTLITE_INTERFACE; GLOO_SOCKET_IFNAME (of a list, the
    first that exists, in both); NCCL_SOCKET_IFNAME in NCCL's syntax; the route to MASTER_ADDR, unless that is
    loopback, which says nothing about the other replicas; the default route; the one interface that has an
    address, where no more than one has; loopback.

    Args:
        host: a numeric address, or a name, which is looked up once. It need not be an address of this machine
            (there may be a NAT in between), but then the caller has to bind to another one.
        interface: the exact name of an interface.
        environ: where to read the variables; ``os.environ`` by default.

    A name, in ``host`` or MASTER_ADDR, goes to ``getaddrinfo``, which can block for as long as the resolver
    likes and cannot be interrupted.

    Raises:
        ValueError: ``host`` and ``interface`` together; a host that does not resolve or that no peer can
            connect to; an interface, by argument or by variable, that does not exist or has no usable address.
    """
    if host is not None and interface is not None:
        raise ValueError(f"host={host!r} and interface={interface!r} both choose the address: give one of them")
    environ = os.environ if environ is None else environ
    if host is not None:
        chosen = _from_host(host)
    elif interface is not None:
        chosen = _from_interfaces([interface], "interface")
    else:
        chosen = _from_variables(environ) or _from_routes(environ)
    _logger.info("address %s, by %s", chosen.ip, chosen.why)
    return chosen


def interface_addresses() -> dict[str, list[str]]:
    """Return the interfaces of this machine and their usable numeric addresses, the best first.

    The primary IPv4 comes before global IPv6 before link-local IPv6 (``fe80::1%eth0``). An interface that is
    down, or has no address that can be bound now, has an empty list and comes last. Outside Linux only the
    names are known.

    Raises:
        OSError: this process may open no more files.
    """
    try:
        names = [name for _, name in socket.if_nameindex()]
    except (OSError, AttributeError):  # a sandbox that forbids it; a platform that lacks it
        return {}
    ipv4 = _up_interfaces(names)
    ipv6: dict[str, list[str]] = {}
    try:
        with open("/proc/net/if_inet6", encoding="utf-8", errors="surrogateescape") as table:
            ipv6 = _parse_if_inet6(table.read())
    except OSError:
        _logger.debug("no IPv6 here, or not Linux")
    found = {name: ipv4[name] + ipv6.get(name, []) if name in ipv4 else [] for name in names}
    return dict(sorted(found.items(), key=lambda item: not item[1]))


def _from_host(host: str) -> Address:
    """The address that ``host`` stands for."""
    ip = numeric_ip(host)
    if not host or (ip is not None and (ip.is_unspecified or ip.is_multicast)):
        raise ValueError(f"host={host!r} is nothing that a peer can connect to: give an address or a name")
    if ip is not None:
        return Address(str(ip), family_of(ip), "host=")
    try:
        found = [(family, ip_of(sockaddr)) for family, sockaddr in lookup_once(host, 0)]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host={host!r} has no address ({error}): give a name that resolves, or an address") from error
    # A hosts file often has the machine's own name at 127.0.1.1, and IPv6 entries where IPv6 is off.
    family, text = min(found, key=lambda each: (_is_loopback(each[1]), not _can_bind(each[1])))
    if _is_loopback(text) and host != "localhost" and _others():
        _logger.warning("host=%r resolves to %s, which no other machine can reach: give an address", host, text)
    return Address(text, family, f"host={host}")


def _from_interfaces(names: Sequence[str], source: str, value: str = "") -> Address:
    """The best address of the first of ``names`` that has one. ``value`` is what ``source`` said literally."""
    table = interface_addresses()
    for name in names:
        for text in table.get(name, [])[:1]:
            return Address(text, family_of(ipaddress.ip_address(text)), f"interface {name} ({source})")
    there = ", ".join(f"{name} ({', '.join(ips) or 'down, or without address'})" for name, ips in table.items())
    raise ValueError(
        f"{source}={value or ','.join(names)} is no interface with an address: correct it, or give host=; "
        f"this machine has {there or 'none that can be listed'}"
    )


def _from_variables(environ: Mapping[str, str]) -> Address | None:
    """The address of the interface that a variable names, or None where none does."""
    for source in ("FTLITE_INTERFACE", "GLOO_SOCKET_IFNAME"):
        names = [name.strip() for name in environ.get(source, "").split(",") if name.strip()]
        if names:
            return _from_interfaces(names, source)
    nccl = environ.get("NCCL_SOCKET_IFNAME", "").strip()
    # NCCL's syntax: "^" first excludes, "=" then means exactly, else prefixes; a ":port" may follow a name.
    exclude = nccl.startswith("^")
    exact = nccl[exclude:].startswith("=")
    given = [entry.partition(":")[0].strip() for entry in nccl[exclude + exact :].split(",")]
    patterns = tuple(name for name in given if name)
    if not patterns:
        return None
    names = []
    for name, ips in interface_addresses().items():
        matches = name in patterns if exact else name.startswith(patterns)
        # Who excludes docker0 does not ask for loopback, though NCCL itself would take it.
        if ips and matches != exclude and not (exclude and _is_loopback(ips[0])):
            names.append(name)
    # To exclude all there is names nothing that could be missing.
    return _from_interfaces(names, "NCCL_SOCKET_IFNAME", nccl) if names or not exclude else None


def _from_routes(environ: Mapping[str, str]) -> Address:
    """The address from which packets leave for the master, or for anywhere; else the only one, or loopback."""
    master = environ.get("MASTER_ADDR", "").strip()
    targets: list[Candidate] = []
    if master:
        try:
            targets = lookup_once(master, _PROBE_PORT)
        except (OSError, UnicodeError) as error:
            _logger.info("MASTER_ADDR %s is skipped: %s", master, error)
    routes = [(target, f"route to MASTER_ADDR {master}") for target in targets]
    far_away = [ipaddress.ip_address(text) for text in _FAR_AWAY]
    routes += [((family_of(ip), sockaddr_of(ip, _PROBE_PORT)), "default route") for ip in far_away]
    for (family, sockaddr), why in routes:
        try:
            # A UDP connect asks the system for the route, and sends nothing.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(sockaddr)
                text = ip_of(probe.getsockname())
        except OSError:
            continue
        if not _is_loopback(text):
            return Address(text, family, why)
    others = _others()
    if len(others) == 1:  # a network of its own, without a router: peers can only be there
        ((name, text),) = others.items()
        return Address(text, family_of(ipaddress.ip_address(text)), f"the only interface {name}")
    text = "::1" if _can_bind("::1") and not _can_bind("127.0.0.1") else "127.0.0.1"
    # A master that could not be looked up is not this machine, as far as anybody can tell.
    if others or (master and not (targets and all(_is_loopback(sockaddr[0]) for _, sockaddr in targets))):
        _logger.warning(
            "no route leads out of this machine, so %s is advertised, which no other machine can reach: set "
            "FTLITE_INTERFACE, or give interface= or host= (other addresses here: %s)",
            text,
            ", ".join(others.values()) or "none",
        )
    return Address(text, family_of(ipaddress.ip_address(text)), "loopback: no route leads out of this machine")


def _others() -> dict[str, str]:
    """The interfaces but loopback that have an address, each with its best one."""
    return {name: ips[0] for name, ips in interface_addresses().items() if ips and not _is_loopback(ips[0])}


def _can_bind(text: str) -> bool:
    """Whether ``text`` is an address of this machine now."""
    ip = ipaddress.ip_address(text)
    try:
        with socket.socket(family_of(ip), socket.SOCK_DGRAM) as probe:
            probe.bind(sockaddr_of(ip, 0))
    except OSError:
        return False
    return True


def _up_interfaces(names: Iterable[str]) -> dict[str, list[str]]:
    """Those of ``names`` that are up, each with its primary IPv4 address if it has one. Linux only."""
    up: dict[str, list[str]] = {}
    if sys.platform != "linux":
        return up
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for name in names:
            request = struct.pack("40s", os.fsencode(name)[:15])  # struct ifreq; a name has 15 bytes and a NUL
            try:
                (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
                if flags & _IFF_UP:
                    up[name] = []
                    up[name].append(socket.inet_ntoa(fcntl.ioctl(control, _SIOCGIFADDR, request)[20:24]))
            except OSError:  # it has no IPv4 address, or went away
                continue
    return up


def _parse_if_inet6(text: str) -> dict[str, list[str]]:
    """Read /proc/net/if_inet6: interface to addresses, global before link-local, lasting before passing ones."""
    ranked: dict[str, list[tuple[bool, bool, str]]] = {}
    for fields in map(str.split, text.splitlines()):
        if len(fields) != 6:
            continue
        digits, scope, flags, name = fields[0], int(fields[3], 16), int(fields[4], 16), fields[5]
        # Not yet, or never, proved unique on its link: it cannot be bound. (An optimistic one can.)
        if flags & _DADFAILED or (flags & _TENTATIVE and not flags & _OPTIMISTIC):
            continue
        link_local = scope == _SCOPE_LINK
        ip = with_zone(str(ipaddress.IPv6Address(bytes.fromhex(digits))), name if link_local else "")
        ranked.setdefault(name, []).append((link_local, bool(flags & (_DEPRECATED | _TEMPORARY)), ip))
    return {name: [ip for _, _, ip in sorted(found, key=lambda each: each[:2])] for name, found in ranked.items()}


def _is_loopback(text: str) -> bool:
    ip = ipaddress.ip_address(text)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None  # only 3.13 looks through it
    return ip.is_loopback if mapped is None else mapped.is_loopback
