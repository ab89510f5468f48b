# SPDX-License-Identifier: BSD-3-Clause
"""What a URL may be, and how listening, looking up and connecting end."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import types
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests import load
from tests._support import SHORT_S, WAIT_S, GuardedTestCase

net = load("_net")
deadlines = load("_deadline")
errors = load("_errors")


class NoIPv6Socket(socket.socket):
    """What a kernel without IPv6 makes of a request for it."""

    def __init__(self, family: int = -1, *args: Any, **options: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        super().__init__(family, *args, **options)


def names(answers: dict[str, list[str]]) -> Any:
    """Patch getaddrinfo; a name that is not in ``answers`` does not exist."""

    def lookup(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        if host not in answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (ip, port, 0, 0))
            if ":" in ip
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port))
            for ip in answers[host]
        ]

    return mock.patch.object(socket, "getaddrinfo", mock.Mock(side_effect=lookup))


class Clock:
    """A clock for both modules that only sleeping and slow resolvers move."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += max(pause_s, 1e-6)

    @contextlib.contextmanager
    def running(self) -> Iterator[Clock]:
        fake = types.SimpleNamespace(monotonic=self.monotonic, sleep=self.sleep)
        with mock.patch.object(net, "time", fake), mock.patch.object(deadlines, "time", fake):
            yield self


class Urls(unittest.TestCase):
    def test_hosts(self) -> None:
        for ip, text in (
            ("10.0.0.1", "10.0.0.1"),
            ("node7", "node7"),
            ("::1", "[::1]"),
            ("fe80::1%eth0", "[fe80::1%25eth0]"),
            ("fe80::1%eth0:1", "[fe80::1%25eth0%3A1]"),
        ):
            self.assertEqual(net.url_host(ip), text)
            self.assertEqual(net.split_url(f"http://{text}:80/x"), (ip, 80, "/x"))

    def test_what_is_accepted(self) -> None:
        for url, parts in (
            ("http://[::1]:80/abc/checkpoint/", ("::1", 80, "/abc/checkpoint/")),
            ("http://[::ffff:10.0.0.1]:80/", ("::ffff:10.0.0.1", 80, "/")),
            ("HTTP://Node-7.rack_1.example:65535", ("Node-7.rack_1.example", 65535, "/")),
            ("http://10.0.0.1:1/a%20b//../;c=[d]@e:f", ("10.0.0.1", 1, "/a%20b//../;c=[d]@e:f")),
        ):
            self.assertEqual(net.split_url(url), parts)

    def test_what_is_refused_never_shows_the_path(self) -> None:
        for url in (
            "",
            "S3CRET",
            "/S3CRET",
            "https://h:80/S3CRET",
            "ftp://h:80/S3CRET",
            "http:/h:80/S3CRET",
            "//h:80/S3CRET",
            " http://h:80/S3CRET",
            "http:///S3CRET",
            "http://:80/S3CRET",
            "http://h/S3CRET",
            "http://h:/S3CRET",
            "http://h:0/S3CRET",
            "http://h:65536/S3CRET",
            "http://h:123456/S3CRET",
            "http://h:-1/S3CRET",
            "http://h:\u0661/S3CRET",
            "http://h:80S3CRET",
            "http://h:80\\S3CRET",
            "http://u:S3CRET@h:80/",
            "http://u:80@h:80/S3CRET",
            "http://h:80/S3CRET?a",
            "http://h:80?S3CRET",
            "http://h:80#S3CRET",
            "http://h:80/S3CRET#",
            "http://h:80/S3CRET ",
            "http://h:80/S3CRET\n",
            "http://h:80\n/S3CRET",
            "http://h:80/S3CRET\x00",
            "http://h:80/S3CRET\r\nHost: x",
            "http://h\t:80/S3CRET",
            "http://h:80/S3CRET\u00e9",
            "http://\u212a:80/S3CRET",
            "http://::1:80/S3CRET",
            "http://[::1:80/S3CRET",
            "http://[::1]80/S3CRET",
            "http://[h]:80/S3CRET",
            "http://[10.0.0.1]:80/S3CRET",
            "http://[1:2]:80/S3CRET",
            "http://[::1%eth0]:80/S3CRET",
            "http://[fe80::1%25]:80/S3CRET",
            "http://[fe80::1%25a%00b]:80/S3CRET",
            "http://[fe80::1%25a%0Ab]:80/S3CRET",
            f"http://{'h' * 254}:80/S3CRET",
        ):
            with self.subTest(url), self.assertRaises(ValueError) as caught:
                net.split_url(url)
            self.assertNotIn("S3CRET", str(caught.exception))
            self.assertIsNone(caught.exception.__cause__)

    def test_what_is_refused_shows_the_address_where_that_is_sure(self) -> None:
        for url in ("http://node7:70000/S3CRET", "http://node7:70000/S3CRET?"):
            with self.assertRaisesRegex(ValueError, "http://node7:70000/"):
                net.split_url(url)


class Listening(GuardedTestCase):
    """T21."""

    def listen(self, *args: Any) -> socket.socket:
        server: socket.socket = net.listen(*args)
        self.addCleanup(server.close)
        return server

    def adjacent(self, count: int) -> range:
        """Ports in a row that were free a moment ago."""
        for _ in range(100):
            with contextlib.ExitStack() as held:
                first = held.enter_context(net.listen("127.0.0.1", socket.AF_INET, 0, 1)).getsockname()[1]
                if first + count > 65536:
                    continue
                with contextlib.suppress(errors.TransferError):
                    for port in range(first + 1, first + count):
                        held.enter_context(net.listen("127.0.0.1", socket.AF_INET, port, 1))
                    return range(first, first + count)
        raise unittest.SkipTest(f"no {count} free ports in a row")

    def test_any_port(self) -> None:
        one, two = (self.listen("127.0.0.1", socket.AF_INET, 0, 5) for _ in range(2))
        self.assertNotEqual(one.getsockname()[1], two.getsockname()[1])
        self.assertFalse(one.get_inheritable())

    def test_instances_share_a_range_until_it_is_used_up(self) -> None:
        ports = self.adjacent(3)
        got = [self.listen("127.0.0.1", socket.AF_INET, ports, 5).getsockname()[1] for _ in ports]
        self.assertEqual(got, list(ports))
        with self.assertRaises(errors.TransferError) as caught:
            self.listen("127.0.0.1", socket.AF_INET, ports, 5)
        self.assertIsInstance(caught.exception, OSError)
        for part in ("127.0.0.1", *map(str, ports), "in use", "port 0"):
            self.assertIn(part, str(caught.exception))
        with self.assertRaisesRegex(errors.TransferError, f"tried {ports[1]} "):
            self.listen("127.0.0.1", socket.AF_INET, ports[1], 5)

    def test_a_long_range_is_shown_by_its_ends(self) -> None:
        with (
            mock.patch.object(net, "_listen_once", side_effect=OSError(errno.EADDRINUSE, "in use")) as tries,
            self.assertRaisesRegex(errors.TransferError, r"tried 1000, 1002, \.\.\. 1998 "),
        ):
            self.listen("127.0.0.1", socket.AF_INET, range(1000, 2000, 2), 5)
        self.assertEqual(tries.call_count, 500)

    def test_bound_but_not_yet_listening_counts_as_busy(self) -> None:
        """With SO_REUSEADDR both may bind; the second to listen has to move on."""
        ports = self.adjacent(2)
        real = socket.socket.listen

        class Slow(socket.socket):
            def listen(self, backlog: int = 0) -> None:
                if self.getsockname()[1] == ports[0]:
                    raise OSError(errno.EADDRINUSE, "in use")
                real(self, backlog)

        with mock.patch.object(socket, "socket", Slow):
            self.assertEqual(self.listen("127.0.0.1", socket.AF_INET, ports, 5).getsockname()[1], ports[1])

    def test_a_port_is_free_again_at_once(self) -> None:
        server = self.listen("127.0.0.1", socket.AF_INET, 0, 5)
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), WAIT_S):
            accepted, _ = server.accept()
            accepted.close()  # our side closes first: the connection stays behind in TIME_WAIT
            server.close()
            self.listen("127.0.0.1", socket.AF_INET, port, 5)

    def test_an_address_of_another_machine(self) -> None:
        with self.assertRaisesRegex(errors.TransferError, "203.0.113.1 .*address of this machine"):
            self.listen("203.0.113.1", socket.AF_INET, 0, 5)
        gone = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        with (
            mock.patch.object(net, "_listen_once", side_effect=gone) as tries,
            self.assertRaisesRegex(errors.TransferError, "10.0.0.1 .Cannot assign"),
        ):
            self.listen("10.0.0.1", socket.AF_INET, range(20000, 30000), 5)
        self.assertEqual(tries.call_count, 1)  # the other ports would tell the same

    def test_bad_arguments(self) -> None:
        for ports in (-1, 65536, range(0), range(5), range(65530, 65537), range(5, -1, -1)):
            with self.subTest(ports), self.assertRaisesRegex(ValueError, re.escape(repr(ports))):
                self.listen("127.0.0.1", socket.AF_INET, ports, 5)
        for odd in (True, 1.5, "80", [80], None):
            with self.subTest(odd), self.assertRaisesRegex(TypeError, "ports is"):
                self.listen("127.0.0.1", socket.AF_INET, odd, 5)
        for ip, family in (("localhost", socket.AF_INET), ("127.0.0.1", socket.AF_INET6), ("::1", socket.AF_INET)):
            with self.subTest(ip), self.assertRaisesRegex(ValueError, re.escape(repr(ip))):
                self.listen(ip, family, 0, 5)

    def test_without_ipv6(self) -> None:
        with mock.patch.object(socket, "socket", NoIPv6Socket):
            self.listen("127.0.0.1", socket.AF_INET, 0, 5)
            with self.assertRaisesRegex(errors.TransferError, r"\[::1\] .*not supported"):
                self.listen("::1", socket.AF_INET6, 0, 5)

    def test_the_ipv6_wildcard_takes_ipv4(self) -> None:
        try:
            server = self.listen("::", socket.AF_UNSPEC, 0, 5)
        except errors.TransferError as error:
            self.skipTest(f"no IPv6 here: {error}")
        with socket.create_connection(("127.0.0.1", server.getsockname()[1]), WAIT_S):
            server.accept()[0].close()


class Resolving(unittest.TestCase):
    """T19."""

    def test_numeric_hosts_need_no_lookup(self) -> None:
        index, name = socket.if_nameindex()[0]
        with names({}) as lookup:
            for host, sockaddr in (
                ("10.0.0.1", ("10.0.0.1", 80)),
                ("::1", ("::1", 80, 0, 0)),
                (f"fe80::1%{name}", ("fe80::1", 80, 0, index)),
                ("fe80::1%7", ("fe80::1", 80, 0, 7)),
            ):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self.assertEqual(net.resolve(host, 80, deadlines.Deadline(0)), [(family, sockaddr)])
            lookup.assert_not_called()

    def test_zone_that_is_not_here(self) -> None:
        for zone in ("nowhere9", "99999999999999"):
            with self.assertRaisesRegex(errors.IncompleteTransfer, rf"\[fe80::1%25{zone}\]:80"):
                net.resolve(f"fe80::1%{zone}", 80, deadlines.Deadline(10))

    def test_duplicates_go_and_the_order_stays(self) -> None:
        with names({"node7": ["10.0.0.2", "::1", "10.0.0.1", "10.0.0.2", "::1"]}) as lookup:
            found = net.resolve("node7", 80, deadlines.Deadline(10))
        self.assertEqual([sockaddr[0] for _, sockaddr in found], ["10.0.0.2", "::1", "10.0.0.1"])
        self.assertEqual(lookup.call_count, 1)

    def test_a_name_that_appears_late(self) -> None:
        answers: dict[str, list[str]] = {}
        with Clock().running() as clock, names(answers) as lookup:
            fake = lookup.side_effect

            def late(*args: Any, **options: Any) -> Any:
                if clock.now_s >= 103:
                    answers["node7"] = ["10.0.0.1"]
                return fake(*args, **options)

            lookup.side_effect = late
            found = net.resolve("node7", 80, deadlines.Deadline(30))
        self.assertEqual(found, [(socket.AF_INET, ("10.0.0.1", 80))])
        self.assertLessEqual(clock.now_s, 104.0)
        self.assertEqual(clock.pauses[:6], [0.05, 0.1, 0.2, 0.4, 0.8, 1.0])
        self.assertEqual(max(clock.pauses), 1.0)

    def test_a_name_that_never_appears(self) -> None:
        with Clock().running() as clock, names({}), self.assertRaises(errors.DeadlineExceeded) as caught:
            net.resolve("node7", 80, deadlines.Deadline(3))
        self.assertAlmostEqual(clock.now_s, 103, places=3)
        for part in ("'node7'", "not known", "limit 3 s"):
            self.assertIn(part, str(caught.exception))
        self.assertIsInstance(caught.exception.__cause__, socket.gaierror)

    def test_no_time_means_one_lookup(self) -> None:
        with names({"node7": ["10.0.0.1"]}) as lookup:
            self.assertEqual(len(net.resolve("node7", 80, deadlines.Deadline(0))), 1)
            with self.assertRaises(errors.DeadlineExceeded):
                net.resolve("node8", 80, deadlines.Deadline(0))
        self.assertEqual(lookup.call_count, 2)

    def test_a_slow_resolver_is_asked_once(self) -> None:
        with Clock().running() as clock, names({"node7": ["10.0.0.1"]}) as lookup:
            fake = lookup.side_effect

            def slow(*args: Any, **options: Any) -> Any:
                clock.now_s += 5
                return fake(*args, **options)

            lookup.side_effect = slow
            for limit_s in (10, 3):  # an answer that is there is not thrown away; connecting will say it is late
                self.assertEqual(len(net.resolve("node7", 80, deadlines.Deadline(limit_s))), 1)
        self.assertEqual((lookup.call_count, clock.pauses), (2, []))

    def test_other_failures_are_retried_and_no_names_are_not(self) -> None:
        busy = OSError(errno.EMFILE, "Too many open files")
        unix = [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", "/x")]
        good = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80))]
        with Clock().running(), mock.patch.object(socket, "getaddrinfo", side_effect=[busy, unix, good]):
            self.assertEqual(len(net.resolve("node7", 80, deadlines.Deadline(10))), 1)
        with self.assertRaisesRegex(ValueError, "cannot be a name"):
            net.resolve("a" * 70, 80, deadlines.Deadline(10))


class Connecting(GuardedTestCase):
    def server(self, ip: str = "127.0.0.1", backlog: int = 5) -> socket.socket:
        server: socket.socket = net.listen(ip, socket.AF_UNSPEC, 0, backlog)
        self.addCleanup(server.close)
        return server

    def connect(self, candidates: Any, limit_s: float = WAIT_S, idle_s: float = WAIT_S, peer: str = "") -> Any:
        client = net.connect(candidates, deadlines.Deadline(limit_s), idle_s, peer)
        self.addCleanup(client.close)
        return client

    def at(self, server: socket.socket) -> tuple[int, Any]:
        return server.family, server.getsockname()

    def refusing(self) -> tuple[int, Any]:
        """An address where nobody listens, kept from others for the length of the test."""
        holder = socket.socket()
        self.addCleanup(holder.close)
        holder.bind(("127.0.0.1", 0))
        return socket.AF_INET, holder.getsockname()

    def black_hole(self) -> tuple[int, Any]:
        """An address that answers nothing: the kernel drops what a full queue of connections cannot take."""
        server = self.server(backlog=0)
        for _ in range(4):
            filler = socket.socket()
            self.addCleanup(filler.close)
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        return self.at(server)

    def test_connects(self) -> None:
        server = self.server()
        client = self.connect([self.at(server)], idle_s=7.5)
        self.assertTrue(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        self.assertEqual(client.gettimeout(), 7.5)
        self.assertEqual(client.getpeername(), server.getsockname())

    def test_ipv6_from_url_to_connection(self) -> None:
        try:
            server = self.server("::1")
        except errors.TransferError as error:
            self.skipTest(f"no IPv6 here: {error}")
        host, port, _ = net.split_url(f"http://{net.url_host('::1')}:{server.getsockname()[1]}/x")
        self.connect(net.resolve(host, port, deadlines.Deadline(WAIT_S)))

    def test_no_time_means_one_try(self) -> None:
        server = self.server()
        self.assertEqual(self.connect([self.at(server)], 0, 0).gettimeout(), 0.05)

    def test_goes_on_to_the_one_that_answers(self) -> None:
        server = self.server()
        with mock.patch.object(socket, "socket", NoIPv6Socket):
            client = self.connect([(socket.AF_INET6, ("::1", 9, 0, 0)), self.refusing(), self.at(server)])
        self.assertEqual(client.getpeername(), server.getsockname())

    def test_a_black_hole_eats_its_share_only(self) -> None:
        server, hole = self.server(), self.black_hole()
        deadline = deadlines.Deadline(SHORT_S)
        net.connect([hole, self.at(server)], deadline, 0.3).close()
        self.assertGreaterEqual(deadline.elapsed_s(), 0.14)

    def test_shares(self) -> None:
        shares: list[float] = []

        def attempt(family: int, sockaddr: Any, share_s: float, idle_s: float) -> Any:
            shares.append(share_s)
            if len(shares) == 2:  # this one refuses at once and leaves its time to the others
                raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
            clock.now_s += share_s
            raise TimeoutError("timed out")

        four = [(socket.AF_INET, (f"10.0.0.{n}", 80)) for n in range(1, 5)]
        for limit_s, idle_s in ((100, 8), (8, 100)):
            shares.clear()
            with (
                Clock().running() as clock,
                mock.patch.object(net, "_connect_once", attempt),
                self.assertRaises(errors.FtliteError),
            ):
                net.connect(four, deadlines.Deadline(limit_s), idle_s)
            for got, wanted in zip(shares, (2, 2, 3, 3), strict=True):
                self.assertAlmostEqual(got, wanted)

    def test_refusal_is_told_at_once(self) -> None:
        family, sockaddr = self.refusing()
        deadline = deadlines.Deadline(SHORT_S)
        with self.assertRaises(errors.IncompleteTransfer) as caught:
            net.connect([(family, sockaddr)], deadline, SHORT_S, f"node7:{sockaddr[1]}")
        self.assertLess(deadline.elapsed_s(), WAIT_S)
        self.assertIsInstance(caught.exception.__cause__, ConnectionRefusedError)
        for part in (f"cannot connect to node7:{sockaddr[1]}", f"127.0.0.1:{sockaddr[1]}: Connection refused"):
            self.assertIn(part, str(caught.exception))

    def test_the_error_tells_which_limit_ended_the_wait(self) -> None:
        hole = self.black_hole()
        with self.assertRaisesRegex(errors.IncompleteTransfer, "no answer in 0.1 s"):
            self.connect([hole], SHORT_S, 0.1)
        with self.assertRaisesRegex(errors.DeadlineExceeded, "no answer in 0.1 s.*limit 0.1 s"):
            self.connect([hole], 0.1, SHORT_S)

    def test_what_failed_is_closed(self) -> None:
        made: list[socket.socket] = []

        class Kept(socket.socket):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                made.append(self)

        refusing = self.refusing()
        with mock.patch.object(socket, "socket", Kept):
            with self.assertRaises(errors.IncompleteTransfer):
                self.connect([refusing])
            with self.assertRaises(errors.TransferError):
                net.listen("203.0.113.1", socket.AF_INET, 0, 5)
        self.assertEqual([each.fileno() for each in made], [-1, -1])

    def test_no_candidates(self) -> None:
        with self.assertRaisesRegex(errors.IncompleteTransfer, "node7:80 .it has no address"):
            self.connect([], peer="node7:80")

    def test_a_connection_to_oneself_is_none(self) -> None:
        class Mirror(socket.socket):
            def getpeername(self) -> Any:
                return self.getsockname()

        with mock.patch.object(socket, "socket", Mirror):
            at = self.at(self.server())
            with self.assertRaisesRegex(errors.IncompleteTransfer, "nobody listens"):
                self.connect([at])

    def test_proxy_variables_play_no_role(self) -> None:
        """T20."""
        dead = "http://127.0.0.1:1"
        with mock.patch.dict(os.environ, dict.fromkeys(("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"), dead)):
            server = self.server()
            client = self.connect(net.resolve(*server.getsockname(), deadlines.Deadline(WAIT_S)))
        self.assertEqual(client.getpeername(), server.getsockname())


if __name__ == "__main__":
    unittest.main()
