# SPDX-License-Identifier: BSD-3-Clause
"""Which address is chosen, what the interfaces have, and both on real networks of several machines."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import types
import unittest
from functools import partial
from typing import Any, ClassVar
from unittest import mock

from tests import load
from tests._support import SHORT_S, GuardedTestCase, captured_logs, child_env, run_python, wait_until
from tests.test_net import NoIPv6Socket, names

interfaces = load("_interfaces")


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
    return mock.patch.object(interfaces, "interface_addresses", lambda: content)


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


class ChooseByName(unittest.TestCase):
    """host=, interface= and the variables."""

    def choose(self, **options: Any) -> Any:
        with table(TABLE):
            return interfaces.choose_address(**{"environ": {}, **options})

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
        self.assertEqual(chosen, interfaces.Address("10.9.8.7", socket.AF_INET, "host=node7"))
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
            self.choose(interface="eth0"), interfaces.Address("10.0.0.1", socket.AF_INET, "interface eth0 (interface)")
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
            self.assertEqual(interfaces.choose_address().ip, "10.0.10.1")


class ChooseByRoute(unittest.TestCase):
    """MASTER_ADDR, the default route, loopback; T4."""

    def choose(self, **environ: str) -> Any:
        return interfaces.choose_address(environ=environ)

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
            for content, environ, warned in (
                (alone, {}, False),
                (alone, {"MASTER_ADDR": "127.0.0.1"}, False),
                (alone, {"MASTER_ADDR": "10.0.0.9"}, True),
                (alone, {"MASTER_ADDR": "not-there-yet"}, True),
                (TABLE, {}, True),
            ):
                with self.subTest(environ), table(content), captured_logs() as records:
                    chosen = self.choose(**environ)
                    self.assertTrue(chosen.loopback)
                    self.assertRegex(chosen.why, "^loopback")
                    loud = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
                    self.assertEqual(len(loud), int(warned))
                    if warned:
                        self.assertIn("FTLITE_INTERFACE", loud[0])
                        self.assertIn("10.0.0.1" if content is TABLE else "none", loud[0])

    def test_the_only_interface_is_taken_where_no_route_leads(self) -> None:
        alone = {"lo": ["127.0.0.1", "::1"], "ib0": []}
        with routes({}), names({"10.0.0.9": ["10.0.0.9"], "127.0.0.1": ["127.0.0.1"]}):
            for ips in (["10.0.0.1", "fd00::1"], ["fd00::1"], ["fe80::1%eth0"]):
                with self.subTest(ips), table({**alone, "eth0": ips}), captured_logs(logging.WARNING) as records:
                    family = socket.AF_INET6 if ":" in ips[0] else socket.AF_INET
                    wanted = interfaces.Address(ips[0], family, "the only interface eth0")
                    self.assertEqual(self.choose(), wanted)
                    for master in ("10.0.0.9", "127.0.0.1", "not-there-yet"):
                        self.assertEqual(self.choose(MASTER_ADDR=master), wanted)
                    self.assertEqual(records, [])
        with table({**alone, "eth0": ["10.0.0.1"]}), routes({"10.0.0.9": "10.0.0.2", "2001:db8::1": "fd00::2"}):
            self.assertEqual(self.choose().why, "default route")
            self.assertEqual(self.choose(MASTER_ADDR="10.0.0.9").why, "route to MASTER_ADDR 10.0.0.9")

    def test_one_of_several_interfaces_is_not_guessed(self) -> None:
        several = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "docker0": ["172.17.0.1"]}
        with routes({}), table(several), captured_logs(logging.WARNING) as records:
            self.assertEqual(self.choose().ip, "127.0.0.1")
        self.assertIn("(other addresses here: 10.0.0.1, 172.17.0.1)", records.pop().getMessage())
        self.assertEqual(records, [])

    def test_the_choice_is_one_info_line(self) -> None:
        with table(TABLE), captured_logs() as records:
            interfaces.choose_address(interface="eth1", environ={})
        self.assertEqual([(record.levelno, record.name) for record in records], [(logging.INFO, interfaces.__name__)])
        self.assertIn("10.0.1.1, by interface eth1", records[0].getMessage())

    def test_without_ipv6(self) -> None:
        with mock.patch.object(socket, "socket", NoIPv6Socket):
            interfaces.interface_addresses()
            with table(TABLE):
                self.assertEqual(self.choose().family, socket.AF_INET)

    def test_loopback_property(self) -> None:
        for ip, loopback in (
            ("127.0.1.1", True),
            ("::1", True),
            ("::ffff:127.0.0.1", True),
            ("10.0.0.1", False),
            ("fe80::1%lo", False),
        ):
            self.assertEqual(interfaces.Address(ip, 0, "").loopback, loopback, ip)


class Interfaces(unittest.TestCase):
    def test_those_of_this_machine(self) -> None:
        found = interfaces.interface_addresses()
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
            interfaces._parse_if_inet6("\n".join(lines)),
            {"eth0": ["fd00::3", "fd00::5", "fd00::1", "fd00::2", "fe80::7%eth0"], "lo": ["::1"]},
        )

    def test_where_little_can_be_found_out(self) -> None:
        with mock.patch.object(interfaces, "sys", types.SimpleNamespace(platform="darwin")):
            self.assertEqual(set(map(tuple, interfaces.interface_addresses().values())), {()})
            with self.assertRaisesRegex(ValueError, "no interface with an address.*lo"):
                interfaces.choose_address(interface="lo", environ={})
        with mock.patch.object(socket, "if_nameindex", side_effect=OSError):
            self.assertEqual(interfaces.interface_addresses(), {})
        with mock.patch("builtins.open", side_effect=FileNotFoundError):
            ips = [ip for found in interfaces.interface_addresses().values() for ip in found]
        self.assertFalse([ip for ip in ips if ":" in ip])


class Importing(unittest.TestCase):
    def test_it_needs_neither_torch_nor_the_environment(self) -> None:
        code = (
            "import sys; from tests import load; load('_interfaces').choose_address('127.0.0.1');"
            "print('torch' in sys.modules)"
        )
        done = run_python("-c", code, env={"FTLITE_INTERFACE": "nowhere9"}, check=True)
        self.assertEqual((done.stdout, done.stderr), ("False\n", ""))


PRELUDE = """
import json, logging, socket, sys
from tests import load
from tests._support import captured_logs
interfaces, net, Deadline = load("_interfaces"), load("_net"), load("_deadline").Deadline
def refuse(*args): raise AssertionError("the host name was asked")
socket.gethostname = socket.getfqdn = refuse
def choose(**environ):
    with captured_logs(logging.WARNING) as records:
        chosen = interfaces.choose_address(environ=environ)
    return [chosen.ip, chosen.why, len(records)]
"""


SERVE = """
ip = next(each for each in interfaces.interface_addresses()["fast"] if each.startswith(sys.argv[1]))
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
    """Real interfaces. ``a`` and ``b`` share two links, the default route of ``a`` is the slow one; ``c`` is alone,
    and ``d`` has one interface and no route out.
    """

    names: ClassVar[dict[str, str]] = {}

    @classmethod
    def setUpClass(cls) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise unittest.SkipTest("making network namespaces needs root and the ip command")
        cls.names = {letter: f"net{os.getpid()}{letter}" for letter in "abcd"}
        for name in cls.names.values():
            made = cls.ip("netns", "add", name, check=False)
            if made.returncode != 0:
                raise unittest.SkipTest(f"no network namespace can be made: {made.stderr.strip()}")
            cls.addClassCleanup(cls.ip, "netns", "del", name, check=False)
        a, b, c, d = cls.names.values()
        for where in ("all", "default"):
            for name in (a, b):  # without the search for duplicates, an address is usable as soon as it is there
                cls.sysctl(name, f"net/ipv6/conf/{where}/disable_ipv6=0", f"net/ipv6/conf/{where}/accept_dad=0")
            for name in (c, d):
                cls.sysctl(name, f"net/ipv6/conf/{where}/disable_ipv6=1")
        for name in cls.names.values():
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
        cls.ip(*f"-n {d} link add only type veth peer name unused".split())
        cls.ip(*f"-n {d} addr add 10.77.9.1/24 dev only".split())
        cls.ip(*f"-n {d} link set only up".split())
        # The kernel adds link-local addresses once it has noticed the other end: at once, or up to a second later.
        for name in (a, b):
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
        """Whether it can be connected from: the route is there, and the address is no longer tentative."""
        route = cls.ip("-n", name, "-6", "route", "show", "dev", link).stdout
        ready = cls.ip("-n", name, "-6", "addr", "show", "dev", link, "scope", "link", "-tentative").stdout
        return "fe80::/64" in route and "fe80::" in ready

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
print(json.dumps([interfaces.interface_addresses(), choose(), choose(FTLITE_INTERFACE="fast"),
    choose(NCCL_SOCKET_IFNAME="fa"), choose(MASTER_ADDR="10.77.1.2"), choose(MASTER_ADDR="127.0.0.1"),
    choose(MASTER_ADDR="fd77:1::2")]))
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

    def test_one_interface_without_a_default_route(self) -> None:
        body = """
chosen = [choose(), choose(MASTER_ADDR="10.9.9.9"), choose(MASTER_ADDR="10.77.9.2")]
with net.listen(chosen[0][0], socket.AF_INET, 0, 5) as server:
    deadline = Deadline(10)
    net.connect(net.resolve(*server.getsockname(), deadline), deadline, 10).close()
print(json.dumps(chosen))
"""
        self.assertEqual(
            self.result("d", body),
            [
                ["10.77.9.1", "the only interface only", 0],
                ["10.77.9.1", "the only interface only", 0],
                ["10.77.9.1", "route to MASTER_ADDR 10.77.9.2", 0],
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
print(json.dumps([interfaces.interface_addresses().get("lo"), choose(), choose(NCCL_SOCKET_IFNAME="^docker"), refused]))
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
