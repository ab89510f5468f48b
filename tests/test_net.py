# SPDX-License-Identifier: BSD-3-Clause
"""Which address is chosen, what a URL may be, and how listening, looking up and connecting end."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import types
import unittest
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar
from unittest import mock

from tests import load
from tests._support import SHORT_S, WAIT_S, GuardedTestCase, captured_logs, child_env, run_python, wait_until

net = load("_net")
deadlines = load("_deadline")
errors = load("_errors")

TABLE = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.1", "fd00::1"],
    "eth1": ["10.0.1.1"],
    "eth10": ["10.0.10.1"],
    "six0": ["fd00:6::1", "fe80::6%six0"],
    "ib0": [],
}


def table(content: dict[str, list[str]]) -> Any:
    return mock.patch.object(net, "interface_addresses", lambda: content)


class NoIPv6Socket(socket.socket):
    """What a kernel without IPv6 makes of a request for it."""

    def __init__(self, family: int = -1, *args: Any, **options: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        super().__init__(family, *args, **options)


class NoRouteSocket(socket.socket):
    """A machine that can talk to nobody, itself aside."""

    def connect(self, address: Any) -> None:
        if address[0] not in ("127.0.0.1", "::1"):
            raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
        super().connect(address)


def routes(sources: dict[str, str]) -> Any:
    """Patch UDP connects: destination to the source address that the system would choose."""

    class Routed(NoRouteSocket):
        source = ""

        def connect(self, address: Any) -> None:
            if address[0] in sources:
                self.source = sources[address[0]]
            else:
                super().connect(address)

        def getsockname(self) -> Any:
            return (self.source, 1) if self.source else super().getsockname()

    return mock.patch.object(socket, "socket", Routed)


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


class ChooseByName(unittest.TestCase):
    """host=, interface= and the variables."""

    def choose(self, **options: Any) -> Any:
        with table(TABLE):
            return net.choose_address(**{"environ": {}, **options})

    def test_one_of_host_and_interface(self) -> None:
        with self.assertRaisesRegex(ValueError, "host='a'.*interface='b'"):
            self.choose(host="a", interface="b")

    def test_numeric_host_is_taken_as_it_is_and_not_looked_up(self) -> None:
        with names({}) as lookup:
            for host, ip, family in (
                ("10.9.8.7", "10.9.8.7", socket.AF_INET),
                ("::1", "::1", socket.AF_INET6),
                ("FD00:0::7", "fd00::7", socket.AF_INET6),
                ("fe80::1%eth0", "fe80::1%eth0", socket.AF_INET6),
            ):
                chosen = self.choose(host=host, environ={"FTLITE_INTERFACE": "eth1"})
                self.assertEqual((chosen.ip, chosen.family), (ip, family))
            lookup.assert_not_called()

    def test_host_that_no_peer_can_connect_to(self) -> None:
        for host in ("", "0.0.0.0", "::", "224.0.0.1"):
            with self.subTest(host), self.assertRaisesRegex(ValueError, "host="):
                self.choose(host=host)

    def test_host_name_is_looked_up_once(self) -> None:
        with names({"node7": ["10.9.8.7", "10.9.8.8"]}) as lookup:
            chosen = self.choose(host="node7")
        self.assertEqual(chosen, net.Address("10.9.8.7", socket.AF_INET, "host=node7"))
        self.assertEqual(lookup.call_count, 1)

    def test_host_name_at_loopback_and_elsewhere(self) -> None:
        with names({"node7": ["127.0.1.1", "10.9.8.7"]}):
            self.assertEqual(self.choose(host="node7").ip, "10.9.8.7")

    def test_host_name_at_loopback_only_is_warned_of(self) -> None:
        answers = {"node7": ["127.0.1.1"], "localhost": ["::1", "127.0.0.1"]}
        with captured_logs(logging.WARNING) as records, names(answers):
            self.assertTrue(self.choose(host="node7").loopback)
            self.assertIn("'node7' resolves to 127.0.1.1", records.pop().getMessage())
            with mock.patch.object(socket, "socket", NoIPv6Socket):
                self.assertEqual(self.choose(host="localhost").ip, "127.0.0.1")
        self.assertEqual(records, [])

    def test_host_name_that_does_not_resolve(self) -> None:
        with names({}), self.assertRaisesRegex(ValueError, "host='node7' has no address.*not known"):
            self.choose(host="node7")
        with self.assertRaisesRegex(ValueError, "has no address"):
            self.choose(host="a" * 70)  # a label may have 63 characters; the codec refuses it

    def test_interface(self) -> None:
        self.assertEqual(
            self.choose(interface="eth0"), net.Address("10.0.0.1", socket.AF_INET, "interface eth0 (interface)")
        )
        self.assertEqual(self.choose(interface="six0").family, socket.AF_INET6)
        self.assertTrue(self.choose(interface="lo").loopback)
        self.assertEqual(self.choose(interface="eth1", environ={"FTLITE_INTERFACE": "eth0"}).ip, "10.0.1.1")

    def test_interface_that_cannot_be_used(self) -> None:
        for name in ("eth9", "eth", "ib0", ""):
            with self.subTest(name), self.assertRaises(ValueError) as caught:
                self.choose(interface=name)
            for part in (f"interface={name} ", "eth0 (10.0.0.1, fd00::1)", "ib0 (down", "host="):
                self.assertIn(part, str(caught.exception))

    def test_variables(self) -> None:
        own, gloo, nccl = "FTLITE_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
        for environ, interface, source in (
            ({own: "eth1", gloo: "eth0", nccl: "docker"}, "eth1", own),
            ({own: " ", gloo: "eth9, eth10 ,eth0", nccl: "docker"}, "eth10", gloo),
            ({gloo: "ib0,eth1"}, "eth1", gloo),
            ({gloo: ",", nccl: "docker"}, "docker0", nccl),
        ):
            with self.subTest(environ):
                chosen = self.choose(environ=environ)
                self.assertEqual((chosen.ip, chosen.why), (TABLE[interface][0], f"interface {interface} ({source})"))

    def test_variable_that_names_what_does_not_exist(self) -> None:
        for variable, value in (
            ("FTLITE_INTERFACE", "eth"),
            ("GLOO_SOCKET_IFNAME", "eth8,eth9"),
            ("NCCL_SOCKET_IFNAME", "=eth"),
            ("NCCL_SOCKET_IFNAME", "wlan,ib"),
        ):
            with self.subTest(variable), self.assertRaises(ValueError) as caught:
                self.choose(environ={variable: value})
            self.assertIn(f"{variable}={value} is no interface", str(caught.exception))
            self.assertIn("eth0 (10.0.0.1", str(caught.exception))

    def test_nccl_syntax(self) -> None:
        for value, interface in (
            ("eth", "eth0"),
            ("eth1", "eth1"),
            ("eth10,docker", "docker0"),  # NCCL takes what matches in the system's order
            ("=eth10", "eth10"),
            ("=eth10,eth0", "eth0"),
            ("=eth10:9000", "eth10"),
            ("wlan,six", "six0"),
            ("lo", "lo"),
            ("^docker", "eth0"),
            ("^docker,eth", "six0"),
            ("^docker,eth1", "eth0"),
            ("^=docker0,eth0", "eth1"),
            ("^=eth", "docker0"),
        ):
            with self.subTest(value):
                chosen = self.choose(environ={"NCCL_SOCKET_IFNAME": value})
                self.assertEqual(chosen.why, f"interface {interface} (NCCL_SOCKET_IFNAME)")

    def test_nccl_that_says_nothing_is_passed_over(self) -> None:
        for value in ("", "^", "=", "^=", ",", "^docker,eth,six"):
            with self.subTest(value), routes({"203.0.113.1": "10.0.0.1"}):
                self.assertEqual(self.choose(environ={"NCCL_SOCKET_IFNAME": value}).why, "default route")

    def test_the_environment_is_read_at_the_call(self) -> None:
        with table(TABLE), mock.patch.dict(os.environ, {"FTLITE_INTERFACE": "eth10"}):
            self.assertEqual(net.choose_address().ip, "10.0.10.1")


class ChooseByRoute(unittest.TestCase):
    """MASTER_ADDR, the default route, loopback; T4."""

    def choose(self, **environ: str) -> Any:
        return net.choose_address(environ=environ)

    def test_master(self) -> None:
        with table(TABLE), routes({"10.0.1.9": "10.0.1.1", "203.0.113.1": "10.0.0.1"}):
            self.assertEqual(self.choose().ip, "10.0.0.1")
            chosen = self.choose(MASTER_ADDR="10.0.1.9")
            self.assertEqual((chosen.ip, chosen.why), ("10.0.1.1", "route to MASTER_ADDR 10.0.1.9"))
            with names({"master": ["10.7.7.7", "10.0.1.9"]}):
                self.assertEqual(self.choose(MASTER_ADDR="master").ip, "10.0.1.1")

    def test_master_that_says_nothing_is_passed_over(self) -> None:
        answers = {"127.0.0.1": ["127.0.0.1"], "me": ["127.0.0.1"], "10.7.7.7": ["10.7.7.7"]}
        with table(TABLE), routes({"203.0.113.1": "10.0.0.1"}), names(answers):
            for master in ("127.0.0.1", "me", "10.7.7.7", "not-there-yet"):
                with self.subTest(master):
                    self.assertEqual(self.choose(MASTER_ADDR=master).why, "default route")

    def test_default_route_by_ipv6(self) -> None:
        with table(TABLE), routes({"2001:db8::1": "fd00::1"}):
            chosen = self.choose()
        self.assertEqual((chosen.ip, chosen.family), ("fd00::1", socket.AF_INET6))

    def test_the_host_name_is_never_asked(self) -> None:
        with (
            table(TABLE),
            routes({"203.0.113.1": "10.0.0.1"}),
            mock.patch.object(socket, "gethostname", side_effect=AssertionError),
            mock.patch.object(socket, "getfqdn", side_effect=AssertionError),
            names({}) as lookup,
        ):
            self.assertEqual(self.choose().ip, "10.0.0.1")
            lookup.assert_not_called()

    def test_loopback_is_warned_of_where_a_remote_peer_may_be_meant(self) -> None:
        alone = {"lo": ["127.0.0.1"]}
        with routes({}), names({"127.0.0.1": ["127.0.0.1"], "10.0.0.9": ["10.0.0.9"]}):
            for interfaces, environ, warned in (
                (alone, {}, False),
                (alone, {"MASTER_ADDR": "127.0.0.1"}, False),
                (alone, {"MASTER_ADDR": "10.0.0.9"}, True),
                (alone, {"MASTER_ADDR": "not-there-yet"}, True),
                (TABLE, {}, True),
            ):
                with self.subTest(environ), table(interfaces), captured_logs() as records:
                    chosen = self.choose(**environ)
                    self.assertTrue(chosen.loopback)
                    self.assertRegex(chosen.why, "^loopback")
                    loud = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
                    self.assertEqual(len(loud), int(warned))
                    if warned:
                        self.assertIn("FTLITE_INTERFACE", loud[0])
                        self.assertIn("10.0.0.1" if interfaces is TABLE else "none", loud[0])

    def test_the_choice_is_one_info_line(self) -> None:
        with table(TABLE), captured_logs() as records:
            net.choose_address(interface="eth1", environ={})
        self.assertEqual([(record.levelno, record.name) for record in records], [(logging.INFO, net.__name__)])
        self.assertIn("10.0.1.1, by interface eth1", records[0].getMessage())

    def test_without_ipv6(self) -> None:
        with mock.patch.object(socket, "socket", NoIPv6Socket):
            self.assertEqual(self.choose().family, socket.AF_INET)
            net.interface_addresses()

    def test_loopback_property(self) -> None:
        for ip, loopback in (
            ("127.0.1.1", True),
            ("::1", True),
            ("::ffff:127.0.0.1", True),
            ("10.0.0.1", False),
            ("fe80::1%lo", False),
        ):
            self.assertEqual(net.Address(ip, 0, "").loopback, loopback, ip)


class Interfaces(unittest.TestCase):
    def test_those_of_this_machine(self) -> None:
        found = net.interface_addresses()
        self.assertEqual(set(found), {name for _, name in socket.if_nameindex()})
        if sys.platform == "linux":
            self.assertTrue(any("127.0.0.1" in ips or "::1" in ips for ips in found.values()), found)
        empty = [not ips for ips in found.values()]
        self.assertEqual(empty, sorted(empty))

    def test_order_and_fitness_of_ipv6(self) -> None:
        lines = [  # address, index, prefix length, scope, flags, name
            "fe800000000000000000000000000007 04 40 20 80 eth0",
            "fd000000000000000000000000000001 04 40 00 01 eth0",  # temporary
            "fd000000000000000000000000000002 04 40 00 20 eth0",  # deprecated
            "fd000000000000000000000000000003 04 40 00 80 eth0",
            "fd000000000000000000000000000004 04 40 00 c0 eth0",  # tentative
            "fd000000000000000000000000000005 04 40 00 44 eth0",  # tentative, optimistic
            "fd000000000000000000000000000006 04 40 00 88 eth0",  # another machine has it
            "00000000000000000000000000000001 01 80 10 80 lo",
            "a line of another kind",
        ]
        self.assertEqual(
            net._parse_if_inet6("\n".join(lines)),
            {"eth0": ["fd00::3", "fd00::5", "fd00::1", "fd00::2", "fe80::7%eth0"], "lo": ["::1"]},
        )

    def test_where_little_can_be_found_out(self) -> None:
        with mock.patch.object(net, "sys", types.SimpleNamespace(platform="darwin")):
            self.assertEqual(set(map(tuple, net.interface_addresses().values())), {()})
            with self.assertRaisesRegex(ValueError, "no interface with an address.*lo"):
                net.choose_address(interface="lo", environ={})
        with mock.patch.object(socket, "if_nameindex", side_effect=OSError):
            self.assertEqual(net.interface_addresses(), {})
        with mock.patch("builtins.open", side_effect=FileNotFoundError):
            ips = [ip for found in net.interface_addresses().values() for ip in found]
        self.assertFalse([ip for ip in ips if ":" in ip])


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


class Importing(unittest.TestCase):
    def test_it_needs_neither_torch_nor_the_environment(self) -> None:
        code = (
            "import sys; from tests import load; net = load('_net'); net.choose_address('127.0.0.1');"
            "print('torch' in sys.modules)"
        )
        done = run_python("-c", code, env={"FTLITE_INTERFACE": "nowhere9"}, check=True)
        self.assertEqual((done.stdout, done.stderr), ("False\n", ""))


PRELUDE = """
import json, logging, socket, sys
from tests import load
from tests._support import captured_logs
net, Deadline = load("_net"), load("_deadline").Deadline
def refuse(*args): raise AssertionError("the host name was asked")
socket.gethostname = socket.getfqdn = refuse
def choose(**environ):
    with captured_logs(logging.WARNING) as records:
        chosen = net.choose_address(environ=environ)
    return [chosen.ip, chosen.why, len(records)]
"""

SERVE = """
ip = next(each for each in net.interface_addresses()["fast"] if each.startswith(sys.argv[1]))
with net.listen(ip, socket.AF_UNSPEC, 0, 5) as server:
    server.settimeout(20)
    print(f"http://{net.url_host(ip)}:{server.getsockname()[1]}/x", flush=True)
    server.accept()[0].close()
"""

FETCH = """
host, port, _ = net.split_url(sys.argv[1])
deadline = Deadline(20)
with net.connect(net.resolve(host, port, deadline), deadline, 20) as client:
    print(json.dumps(client.recv(1).decode()))
"""


class Namespaces(GuardedTestCase):
    """Real interfaces. ``a`` and ``b`` share two links, the default route of ``a`` is the slow one; ``c`` is alone."""

    names: ClassVar[dict[str, str]] = {}

    @classmethod
    def setUpClass(cls) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise unittest.SkipTest("making network namespaces needs root and the ip command")
        cls.names = {letter: f"net{os.getpid()}{letter}" for letter in "abc"}
        for name in cls.names.values():
            made = cls.ip("netns", "add", name, check=False)
            if made.returncode != 0:
                raise unittest.SkipTest(f"no network namespace can be made: {made.stderr.strip()}")
            cls.addClassCleanup(cls.ip, "netns", "del", name, check=False)
        a, b, c = cls.names.values()
        for where in ("all", "default"):
            for name in (a, b):  # without the search for duplicates, an address is usable as soon as it is there
                cls.sysctl(name, f"net/ipv6/conf/{where}/disable_ipv6=0", f"net/ipv6/conf/{where}/accept_dad=0")
            cls.sysctl(c, f"net/ipv6/conf/{where}/disable_ipv6=1")
        for name in (a, b, c):
            cls.ip("-n", name, "link", "set", "lo", "up")
        for number, link in enumerate(("fast", "slow", "off"), 1):
            made = cls.ip(*f"-n {a} link add {link} type veth peer name {link} netns {b}".split(), check=False)
            if made.returncode != 0:
                raise unittest.SkipTest(f"no veth link can be made: {made.stderr.strip()}")
            for last, name in ((1, a), (2, b)):
                cls.ip(*f"-n {name} addr add 10.77.{number}.{last}/24 dev {link}".split())
                if link != "off":
                    cls.ip(*f"-n {name} addr add fd77:{number}::{last}/64 dev {link} nodad".split())
                    cls.ip(*f"-n {name} link set {link} up".split())
        cls.ip(*f"-n {a} route add default via 10.77.2.2".split())
        for name in (a, b):  # the kernel adds link-local addresses when it has noticed the other end, a moment later
            for link in ("fast", "slow"):
                wait_until(partial(cls.link_local, name, link), f"{link} in {name} has a link-local address")

    @staticmethod
    def ip(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=SHORT_S / 2, check=False)
        if check and done.returncode != 0:
            raise AssertionError(f"ip {' '.join(args)}: {done.stderr}")
        return done

    @classmethod
    def link_local(cls, name: str, link: str) -> bool:
        return "fe80::/64" in cls.ip("-n", name, "-6", "route", "show", "dev", link).stdout

    @classmethod
    def sysctl(cls, name: str, *settings: str) -> None:
        script = "; ".join("echo {1} > /proc/sys/{0}".format(*setting.split("=")) for setting in settings)
        done = cls.ip("netns", "exec", name, "sh", "-ec", script, check=False)
        if done.returncode != 0:
            raise unittest.SkipTest(f"no IPv6 to set up in a namespace: {done.stderr.strip()}")

    def start(self, letter: str, body: str, *args: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.names[letter], sys.executable, "-c", PRELUDE + body, *args]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, env=child_env(), stdout=pipe, stderr=pipe, text=True)
        self.addCleanup(child.communicate)
        self.addCleanup(child.kill)
        return child

    def result(self, letter: str, body: str, *args: str) -> Any:
        child = self.start(letter, body, *args)
        out, err = child.communicate(timeout=SHORT_S / 2)
        self.assertEqual((child.returncode, err), (0, ""), err)
        return json.loads(out)

    def test_two_networks(self) -> None:
        body = """
print(json.dumps([net.interface_addresses(), choose(), choose(FTLITE_INTERFACE="fast"), choose(NCCL_SOCKET_IFNAME="fa"),
    choose(MASTER_ADDR="10.77.1.2"), choose(MASTER_ADDR="127.0.0.1"), choose(MASTER_ADDR="fd77:1::2")]))
"""
        found, *chosen = self.result("a", body)
        self.assertEqual(list(found), ["lo", "fast", "slow", "off"])
        self.assertEqual((found["lo"], found["off"]), (["127.0.0.1", "::1"], []))
        for number, link in enumerate(("fast", "slow"), 1):
            self.assertEqual(found[link][:2], [f"10.77.{number}.1", f"fd77:{number}::1"])
            self.assertRegex(found[link][2], rf"^fe80::.*%{link}$")
            self.assertEqual(len(found[link]), 3)
        self.assertEqual(
            chosen,
            [
                ["10.77.2.1", "default route", 0],
                ["10.77.1.1", "interface fast (FTLITE_INTERFACE)", 0],
                ["10.77.1.1", "interface fast (NCCL_SOCKET_IFNAME)", 0],
                ["10.77.1.1", "route to MASTER_ADDR 10.77.1.2", 0],
                ["10.77.2.1", "default route", 0],
                ["fd77:1::1", "route to MASTER_ADDR fd77:1::2", 0],
            ],
        )

    def test_two_networks_without_a_default_route(self) -> None:
        body = 'print(json.dumps([choose(), choose(MASTER_ADDR="10.77.1.1"), choose(MASTER_ADDR="10.9.9.9")]))'
        self.assertEqual(
            self.result("b", body),
            [
                ["127.0.0.1", "loopback: no route leads out of this machine", 1],
                ["10.77.1.2", "route to MASTER_ADDR 10.77.1.1", 0],
                ["127.0.0.1", "loopback: no route leads out of this machine", 1],
            ],
        )

    def test_alone_and_without_ipv6(self) -> None:
        body = """
with net.listen("127.0.0.1", socket.AF_INET, 0, 5) as server:
    deadline = Deadline(10)
    candidates = [(socket.AF_INET6, ("::1", 9, 0, 0)), *net.resolve("127.0.0.1", server.getsockname()[1], deadline)]
    net.connect(candidates, deadline, 10).close()
try:
    net.listen("::1", socket.AF_INET6, 0, 5)
except OSError as error:
    refused = str(error)
print(json.dumps([net.interface_addresses().get("lo"), choose(), choose(NCCL_SOCKET_IFNAME="^docker"), refused]))
"""
        addresses, *chosen, refused = self.result("c", body)
        self.assertEqual(addresses, ["127.0.0.1"])
        self.assertEqual(chosen, [["127.0.0.1", "loopback: no route leads out of this machine", 0]] * 2)
        self.assertIn("[::1]", refused)

    def test_a_connection_between_machines(self) -> None:
        for kind in ("10.", "fd77", "fe80"):
            with self.subTest(kind):
                server = self.start("a", SERVE, kind)
                url = server.stdout.readline().strip()  # type: ignore[union-attr]
                self.assertTrue(url, "the server ended early")
                self.assertEqual(self.result("b", FETCH, url), "")


if __name__ == "__main__":
    unittest.main()
