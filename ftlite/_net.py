# SPDX-License-Identifier: BSD-3-Clause
"""Sockets and URLs: where to listen, how a URL writes an address, how to look one up and how to connect to it.

Rules of this file: a name is looked up once, and from then on only numeric addresses are used; IPv6 may be
missing; no text shows the path of a URL, since it holds a secret; proxy variables play no role. Which address
to advertise is decided in ``_interfaces``, which shares the helpers for numeric addresses below.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote

from ._deadline import Deadline
from ._errors import IncompleteTransfer, TransferError

__all__ = ["Candidate", "connect", "listen", "resolve", "split_store_address", "split_url", "url_host"]

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
_PORTS_LISTED = 16  # a longer range is shown by its ends, so that the message stays one to read
_BUSY = (errno.EADDRINUSE, errno.EACCES)  # taken, or kept for root: another port may do

# Groups: IPv6, its zone, a name (253: the longest that DNS holds), the port.
_URL_START = re.compile(
    r"http://(?:\[([0-9a-f:.]+)(?:%25([a-z0-9._~%-]+))?\]|([a-z0-9._-]{1,253})):([0-9]{1,5})(?=[/?#]|\Z)",
    re.IGNORECASE | re.ASCII,  # without ASCII, the Kelvin sign would pass for a "k"
)
_URL_PATH = re.compile(r"(?:/[!-~]*)?")  # printable ASCII; "?" and "#" are looked for apart


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
    ip = numeric_ip(address_ip)
    if ip is None or family not in (family_of(ip), socket.AF_UNSPEC):
        raise ValueError(f"cannot bind to {address_ip!r}, family {int(family)}: give a numeric address of that family")
    reason: OSError | None = None
    for port in wanted:
        try:
            return _listen_once(family_of(ip), sockaddr_of(ip, port), backlog)
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
    if ipv6 and (":" not in ipv6 or not re.fullmatch(r"[!-~]*", zone) or not numeric_ip(with_zone(ipv6, zone))):
        fault = "has no IPv6 address in its brackets"
    elif not 0 < port < 65536:
        fault = "has a port outside 1-65535"
    elif "?" in path or "#" in path:
        fault = "has a query or a fragment"
    elif not _URL_PATH.fullmatch(path):
        fault = "has a space, a control character or one that is not ASCII in its path"
    if fault:
        raise ValueError(f"the URL {start[0]}/... {fault}: give http://host:port/path and no more")
    return with_zone(ipv6, zone) if ipv6 else name, port, path or "/"


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
    ip = numeric_ip(host)
    if ip is not None:
        try:
            return [(family_of(ip), sockaddr_of(ip, port))]
        except OSError as error:
            raise IncompleteTransfer(
                f"cannot connect to {url_host(host)}:{port} ({_text(error)}): behind the % is an interface of the "
                "peer, which has to be called the same here; let it advertise an address that is not link-local"
            ) from error
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return lookup_once(host, port)
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
            failures.append(f"{url_host(ip_of(sockaddr))}:{sockaddr[1]}: {reason}")
    tries = "; ".join(failures) or "it has no address"
    tries = f"{peer} ({tries})" if peer else tries
    if isinstance(last, TimeoutError) and reserved_s == 0.0:
        hint = "check that the peer runs and that no firewall is between"
        raise deadline.exceeded(f"connecting to {tries}", hint) from last
    raise IncompleteTransfer(
        f"cannot connect to {tries}; check that the peer still runs and that this machine can reach its address"
    ) from last


def split_store_address(text: str) -> tuple[str, int, str]:
    """Take apart the address of a store, ``host:port/prefix``: host, port, prefix ("" where there is none).

    An IPv6 host stands in brackets, or bare, since the port follows the last colon either way.

    Raises:
        ValueError: it has another form.
    """
    where, _, prefix = text.partition("/")
    host, _, port = where.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"the store address {text!r} is not host:port/prefix: give for example 10.0.0.1:29500/step7")
    return host, int(port), prefix


# --- numeric addresses, for _interfaces as well ----------------------------------------------------------


def numeric_ip(host: str) -> _IP | None:
    """The address that ``host`` is in digits, or None where it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def family_of(ip: _IP) -> int:
    return int(socket.AF_INET if ip.version == 4 else socket.AF_INET6)


def with_zone(ip: str, zone: str) -> str:
    return f"{ip}%{zone}" if zone else ip


def sockaddr_of(ip: _IP, port: int) -> tuple[Any, ...]:
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


def ip_of(sockaddr: tuple[Any, ...]) -> str:
    """The address of a sockaddr, with its zone, by name where that is known."""
    if len(sockaddr) < 4 or not sockaddr[3] or "%" in sockaddr[0]:
        return str(sockaddr[0])
    try:
        return with_zone(sockaddr[0], socket.if_indextoname(sockaddr[3]))
    except OSError:
        return with_zone(sockaddr[0], str(sockaddr[3]))


def lookup_once(host: str, port: int) -> list[Candidate]:
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


# --- one try each ----------------------------------------------------------------------------------------


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
