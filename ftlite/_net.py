# SPDX-License-Identifier: BSD-3-Clause
"""Addresses: which one to advertise, where to listen, how a URL writes it, and how to connect to it.

Rules of this file: the address is chosen by a stated order, never guessed from the host name; a name is
looked up once, and from then on only numeric addresses are used; IPv6 may be missing; no text shows the
path of a URL, since it holds a secret; proxy variables play no role; the environment is read when a
function is called, never at import.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from ._deadline import Deadline
from ._errors import IncompleteTransfer, TransferError

try:
    import fcntl
except ImportError:  # Windows has none; interface_addresses() then knows names only
    fcntl = None  # type: ignore[assignment]

__all__ = ["Address", "choose_address", "connect", "interface_addresses", "listen", "resolve", "split_url", "url_host"]

_logger = logging.getLogger(__name__)

Candidate = tuple[int, tuple[Any, ...]]  # (family, sockaddr), always numeric
_IP = ipaddress.IPv4Address | ipaddress.IPv6Address

# A name that a scheduler is about to publish appears within moments: ask again soon, and no more than
# once a second, since many replicas may wait for the same name server.
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
# A timeout of 0 means "try once", and a socket timeout of 0 means "do not wait at all". A peer in the same
# rack answers in well under a millisecond; this leaves room for a busy one.
_SHORTEST_TRY_S = 0.05
# Documentation addresses (RFC 5737, RFC 3849): nobody's, so only the default route leads there.
_FAR_AWAY = ("203.0.113.1", "2001:db8::1")
_PROBE_PORT = 9  # "discard"; a UDP connect sends nothing, so any port but 0 will do
_PORTS_LISTED = 16  # a longer range is shown by its ends, so that the message stays one to read
_BUSY = (errno.EADDRINUSE, errno.EACCES)  # taken, or kept for root: another port may do

# Linux only, from linux/sockios.h, linux/if.h and linux/if_addr.h; Python has no names for them.
_SIOCGIFFLAGS, _SIOCGIFADDR, _IFF_UP = 0x8913, 0x8915, 0x1
_TEMPORARY, _OPTIMISTIC, _DADFAILED, _DEPRECATED, _TENTATIVE = 0x01, 0x04, 0x08, 0x20, 0x40
_SCOPE_LINK = 0x20

# Groups: IPv6, its zone, a name (253: the longest that DNS holds), the port.
_URL_START = re.compile(
    r"http://(?:\[([0-9a-f:.]+)(?:%25([a-z0-9._~%-]+))?\]|([a-z0-9._-]{1,253})):([0-9]{1,5})(?=[/?#]|\Z)",
    re.IGNORECASE | re.ASCII,  # without ASCII, the Kelvin sign would pass for a "k"
)
_URL_PATH = re.compile(r"(?:/[!-~]*)?")  # printable ASCII; "?" and "#" are looked for apart


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
    loopback, which says nothing about the other replicas; the default route; loopback.

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


def listen(address_ip: str, family: int, ports: int | range, backlog: int) -> socket.socket:
    """Return a TCP socket that listens at ``address_ip``, a numeric address or a wildcard.

    Args:
        address_ip: where to bind. ``::`` takes IPv4 as well where the system can do that.
        family: that of the address; ``socket.AF_UNSPEC`` to go by the address.
        ports: one port, 0 for any that is free, or a range of which the first free one is taken.
        backlog: how many connections may wait to be accepted.

    Raises:
        TransferError: an OSError; every port is busy, or the address is not one of this machine.
        ValueError, TypeError: the address is not numeric or not of ``family``; a port is out of range.
    """
    wanted = _checked_ports(ports)
    ip = _numeric(address_ip)
    if ip is None or family not in (_family(ip), socket.AF_UNSPEC):
        raise ValueError(f"cannot bind to {address_ip!r}, family {int(family)}: give a numeric address of that family")
    reason: OSError | None = None
    for port in wanted:
        try:
            return _listen_once(_family(ip), _sockaddr(ip, port), backlog)
        except OSError as error:
            reason = error
            if error.errno not in _BUSY:  # the same at every port
                break
    if reason is not None and reason.errno in _BUSY:
        few = len(wanted) <= _PORTS_LISTED
        tried = ", ".join(map(str, wanted)) if few else f"{wanted[0]}, {wanted[1]}, ... {wanted[-1]}"
        raise TransferError(
            f"cannot listen at {url_host(address_ip)}: no free port, tried {tried} ({_text(reason)}); "
            "free one, widen the range, or give port 0 for any"
        ) from reason
    raise TransferError(
        f"cannot listen at {url_host(address_ip)} ({_text(reason)}); bind to an address of this machine, "
        "a link-local one with its interface, like fe80::1%eth0"
    ) from reason


def url_host(ip: str) -> str:
    """Return ``ip`` as a URL wants it: IPv6 in brackets, its zone behind ``%25`` (RFC 6874), all else as it is."""
    if ":" not in ip:
        return ip
    base, _, zone = ip.partition("%")
    return f"[{base}%25{quote(zone, safe='')}]" if zone else f"[{base}]"


def split_url(url: str) -> tuple[str, int, str]:
    """Split ``http://host:port/path`` into host, port and path; the host without brackets, its zone decoded.

    Raises:
        ValueError: it is anything else, or not printable ASCII. The text shows host:port at most, never the path.
    """
    start = _URL_START.match(url)
    if start is None:  # then it is not known where the secret begins, and nothing is shown
        raise ValueError(
            "the URL (not shown, its path is a secret) does not begin with http://host:port: give it so, IPv6 in "
            "[brackets], without user information"
        )
    ipv6, zone, name, port = start[1], unquote(start[2] or ""), start[3], int(start[4])
    path = url[start.end() :]
    fault = ""
    if ipv6 and (":" not in ipv6 or not re.fullmatch(r"[!-~]*", zone) or not _numeric(_with_zone(ipv6, zone))):
        fault = "has no IPv6 address in its brackets"
    elif not 0 < port < 65536:
        fault = "has a port outside 1-65535"
    elif "?" in path or "#" in path:
        fault = "has a query or a fragment"
    elif not _URL_PATH.fullmatch(path):
        fault = "has a space, a control character or one that is not ASCII in its path"
    if fault:
        raise ValueError(f"the URL {start[0]}/... {fault}: give http://host:port/path and no more")
    return _with_zone(ipv6, zone) if ipv6 else name, port, path or "/"


def resolve(host: str, port: int, deadline: Deadline) -> list[Candidate]:
    """Return the numeric addresses to connect to, as (family, sockaddr), in the resolver's order, no duplicates.

    A numeric host needs no lookup. A name that is not there yet is asked for again, with pauses of 50 ms to
    1 s, until the deadline; at least once. ``getaddrinfo`` can block past the deadline and cannot be
    interrupted: call this where that does no harm.

    Raises:
        DeadlineExceeded: the name had no address until then; the text has the last reason.
        IncompleteTransfer: the ``%zone`` of a numeric host is not an interface of this machine.
        ValueError: the host cannot be a name at all.
    """
    ip = _numeric(host)
    if ip is not None:
        try:
            return [(_family(ip), _sockaddr(ip, port))]
        except OSError as error:
            raise IncompleteTransfer(
                f"cannot connect to {url_host(host)}:{port} ({_text(error)}): behind the % is an interface of the "
                "peer, which has to be called the same here; let it advertise an address that is not link-local"
            ) from error
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return _lookup(host, port)
        except UnicodeError as error:
            raise ValueError(f"the host {host!r} cannot be a name ({error}): give a DNS name or an address") from error
        except OSError as error:  # not only gaierror: too many open files may pass as well
            if deadline.expired():
                hint = f"the last answer was: {_text(error)}; check the name, or let the peer advertise an address"
                raise deadline.exceeded(f"looking up {host!r}", hint) from error
        time.sleep(min(pause_s, deadline.remaining_s()))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def connect(candidates: Sequence[Candidate], deadline: Deadline, idle_s: float, peer: str = "") -> socket.socket:
    """Return a TCP connection to the first of ``candidates`` that answers.

    All tries together take at most ``idle_s`` seconds and end at the deadline; what is left of that is shared
    evenly among the candidates not yet tried, so one that never answers does not eat the time of the others.
    Each gets 50 ms at least. The socket has TCP_NODELAY and a timeout of ``idle_s`` per operation.

    Args:
        candidates: as from ``resolve``.
        deadline: of the whole call that this is a part of.
        idle_s: how long a peer may be silent, in seconds.
        peer: the host:port that the candidates stand for, for the message.

    Raises:
        DeadlineExceeded: the deadline, not ``idle_s``, ended the wait for the last candidate.
        IncompleteTransfer: nobody could be connected to; the text has each reason, the last error is chained.
    """
    reserved_s = max(0.0, deadline.remaining_s() - idle_s)  # what of the deadline these tries leave alone
    failures: list[str] = []
    last: OSError | None = None
    for index, (family, sockaddr) in enumerate(candidates):
        share_s = max(_SHORTEST_TRY_S, (deadline.remaining_s() - reserved_s) / (len(candidates) - index))
        try:
            return _connect_once(family, sockaddr, share_s, max(_SHORTEST_TRY_S, idle_s))
        except OSError as error:
            last = error
            reason = f"no answer in {share_s:.3g} s" if isinstance(error, TimeoutError) else _text(error)
            failures.append(f"{url_host(_ip_of(sockaddr))}:{sockaddr[1]}: {reason}")
    tries = "; ".join(failures) or "it has no address"
    tries = f"{peer} ({tries})" if peer else tries
    if isinstance(last, TimeoutError) and reserved_s == 0.0:
        hint = "check that the peer runs and that no firewall is between"
        raise deadline.exceeded(f"connecting to {tries}", hint) from last
    raise IncompleteTransfer(
        f"cannot connect to {tries}; check that the peer still runs and that this machine can reach its address"
    ) from last


def _from_host(host: str) -> Address:
    """The address that ``host`` stands for."""
    ip = _numeric(host)
    if not host or (ip is not None and (ip.is_unspecified or ip.is_multicast)):
        raise ValueError(f"host={host!r} is nothing that a peer can connect to: give an address or a name")
    if ip is not None:
        return Address(str(ip), _family(ip), "host=")
    try:
        found = [(family, _ip_of(sockaddr)) for family, sockaddr in _lookup(host, 0)]
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
            return Address(text, _family(ipaddress.ip_address(text)), f"interface {name} ({source})")
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
    """The address from which packets leave for the master, or for anywhere; loopback where they cannot."""
    master = environ.get("MASTER_ADDR", "").strip()
    targets: list[Candidate] = []
    if master:
        try:
            targets = _lookup(master, _PROBE_PORT)
        except (OSError, UnicodeError) as error:
            _logger.info("MASTER_ADDR %s is skipped: %s", master, error)
    routes = [(target, f"route to MASTER_ADDR {master}") for target in targets]
    far_away = [ipaddress.ip_address(text) for text in _FAR_AWAY]
    routes += [((_family(ip), _sockaddr(ip, _PROBE_PORT)), "default route") for ip in far_away]
    for (family, sockaddr), why in routes:
        try:
            # A UDP connect asks the system for the route, and sends nothing.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(sockaddr)
                text = _ip_of(probe.getsockname())
        except OSError:
            continue
        if not _is_loopback(text):
            return Address(text, family, why)
    text = "::1" if _can_bind("::1") and not _can_bind("127.0.0.1") else "127.0.0.1"
    others = _others()
    # A master that could not be looked up is not this machine, as far as anybody can tell.
    if others or (master and not (targets and all(_is_loopback(sockaddr[0]) for _, sockaddr in targets))):
        _logger.warning(
            "no route leads out of this machine, so %s is advertised, which no other machine can reach: set "
            "FTLITE_INTERFACE, or give interface= or host= (other addresses here: %s)",
            text,
            ", ".join(others) or "none",
        )
    return Address(text, _family(ipaddress.ip_address(text)), "loopback: no route leads out of this machine")


def _others() -> list[str]:
    """The best address of each interface but loopback."""
    return [ips[0] for ips in interface_addresses().values() if ips and not _is_loopback(ips[0])]


def _can_bind(text: str) -> bool:
    """Whether ``text`` is an address of this machine now."""
    ip = ipaddress.ip_address(text)
    try:
        with socket.socket(_family(ip), socket.SOCK_DGRAM) as probe:
            probe.bind(_sockaddr(ip, 0))
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
        ip = _with_zone(str(ipaddress.IPv6Address(bytes.fromhex(digits))), name if link_local else "")
        ranked.setdefault(name, []).append((link_local, bool(flags & (_DEPRECATED | _TEMPORARY)), ip))
    return {name: [ip for _, _, ip in sorted(found, key=lambda each: each[:2])] for name, found in ranked.items()}


def _numeric(host: str) -> _IP | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _family(ip: _IP) -> int:
    return int(socket.AF_INET if ip.version == 4 else socket.AF_INET6)


def _with_zone(ip: str, zone: str) -> str:
    return f"{ip}%{zone}" if zone else ip


def _is_loopback(text: str) -> bool:
    ip = ipaddress.ip_address(text)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None  # only 3.13 looks through it
    return ip.is_loopback if mapped is None else mapped.is_loopback


def _sockaddr(ip: _IP, port: int) -> tuple[Any, ...]:
    """What bind and connect take. They drop a zone from the text, so it becomes a number here.

    Raises:
        OSError: the zone is not an interface of this machine.
    """
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip), port
    zone = ip.scope_id or "0"
    # 9 digits fit the 32 bits of the field; anything longer can only be a name.
    index = int(zone) if re.fullmatch("[0-9]{1,9}", zone) else socket.if_nametoindex(zone)
    return str(ip).partition("%")[0], port, 0, index


def _ip_of(sockaddr: tuple[Any, ...]) -> str:
    """The address of a sockaddr, with its zone, by name where that is known."""
    if len(sockaddr) < 4 or not sockaddr[3] or "%" in sockaddr[0]:
        return str(sockaddr[0])
    try:
        return _with_zone(sockaddr[0], socket.if_indextoname(sockaddr[3]))
    except OSError:
        return _with_zone(sockaddr[0], str(sockaddr[3]))


def _lookup(host: str, port: int) -> list[Candidate]:
    """Ask getaddrinfo once. Raises OSError where there is no address, UnicodeError where it is no name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    candidates = [
        (int(family), tuple(sockaddr))
        for family, _, _, _, sockaddr in found
        if family in (socket.AF_INET, socket.AF_INET6)
    ]
    if not candidates:
        raise socket.gaierror(socket.EAI_NONAME, "the name has no IPv4 or IPv6 address")
    return list(dict.fromkeys(candidates))


def _checked_ports(ports: int | range) -> Sequence[int]:
    if isinstance(ports, bool) or not isinstance(ports, (int, range)):
        raise TypeError(f"ports is {ports!r} ({type(ports).__name__}): give a port, 0 for any, or a range of ports")
    if isinstance(ports, int) and 0 <= ports < 65536:
        return [ports]
    if isinstance(ports, range) and ports and min(ports) > 0 and max(ports) < 65536:
        return ports
    raise ValueError(f"ports is {ports!r}: give one of 1-65535, 0 for any, or a range that has some, all of 1-65535")


def _listen_once(family: int, sockaddr: tuple[Any, ...], backlog: int) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # a restart need not wait for old connections; on Windows it would share live ports
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            try:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            except OSError:
                _logger.debug("this system keeps IPv4 off IPv6 sockets")
        server.bind(sockaddr)
        # Two may bind to the same port as long as neither listens: only this settles who has it.
        server.listen(backlog)
    except BaseException:
        server.close()
        raise
    return server


def _connect_once(family: int, sockaddr: tuple[Any, ...], limit_s: float, idle_s: float) -> socket.socket:
    client = socket.socket(family, socket.SOCK_STREAM)
    try:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.settimeout(limit_s)
        client.connect(sockaddr)
        # Where nobody listens, the system may pick that very port for our side and connect us to ourselves.
        if client.getsockname() == client.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        client.settimeout(idle_s)
    except BaseException:
        client.close()
        raise
    return client


def _text(error: OSError | None) -> str:
    return "" if error is None else str(error.strerror or error)
