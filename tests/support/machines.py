"""Machines as network namespaces with links that a test can cut.

A router connects the namespaces with each other and with the namespace of the tests.
This works only on Linux, as root, with the program `ip`. A cut link drops packets
silently.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import subprocess

import attrs
import pytest

from logcore.closeable import Closeable

#: The name of the namespace of the tests as one end of a link.
TESTS = "tests"
_networks = itertools.count()


def _ip(*arguments: str) -> str:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@attrs.frozen
class Machine:
    """A namespace with one address."""

    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        """Return the command that runs a command on this machine."""
        return ["ip", "netns", "exec", self.namespace, *command]


class Network(Closeable):
    """Machines by name. Each machine is in a separate network with a router.

    Skips the test if the system has no network namespaces.
    """

    def __init__(self, *names: str) -> None:
        if os.name != "posix" or os.geteuid() or shutil.which("ip") is None:
            pytest.skip("needs root and the program ip, for network namespaces")
        # A test may create a network besides the network of its module, so the prefix is
        # unique. It is short, because interface names have at most 15 characters.
        self._prefix = f"lc{os.getpid() % 100_000}n{next(_networks)}"
        self._router = f"{self._prefix}router"
        self._host_link = f"{self._prefix}host"
        self._cuts: set[tuple[str, str]] = set()
        self._namespaces: list[str] = []
        subnet = self._free_network()
        self._addresses = {
            name: f"10.{subnet}.{number}.2"
            for number, name in enumerate((TESTS, *names))
        }
        self.machines = {
            name: Machine(f"{self._prefix}{name}", self._addresses[name])
            for name in names
        }
        try:
            self._create(subnet)
        except OSError as error:
            self.close()
            pytest.skip(f"needs network namespaces: {error}")

    @staticmethod
    def _free_network() -> int:
        used = _ip("-4", "addr") + _ip("-4", "route")
        return random.choice(
            [number for number in range(80, 200) if f"10.{number}." not in used]
        )

    def _create(self, subnet: int) -> None:
        self._add_namespace(self._router)
        for number, name in enumerate(self._addresses):
            inner = outer = f"{self._prefix}r{number}"
            if name == TESTS:
                inner = self._host_link
                _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
                options: tuple[str, ...] = ()
            else:
                namespace = self.machines[name].namespace
                self._add_namespace(namespace)
                inner = "eth0"
                peer = ("peer", "name", inner, "netns", namespace)
                _ip("link", "add", outer, "type", "veth", *peer)
                options = ("-n", namespace)
            gateway = f"10.{subnet}.{number}.1"
            _ip("link", "set", outer, "netns", self._router)
            _ip("-n", self._router, "addr", "add", f"{gateway}/30", "dev", outer)
            _ip("-n", self._router, "link", "set", outer, "up")
            address = f"{self._addresses[name]}/30"
            _ip(*options, "addr", "add", address, "dev", inner)
            _ip(*options, "link", "set", inner, "up")
            _ip(*options, "route", "add", f"10.{subnet}.0.0/16", "via", gateway)
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        _ip("netns", "exec", self._router, "sh", "-c", forward)

    def _add_namespace(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")

    def close(self) -> None:
        """Delete the namespaces, with the links in them."""
        with contextlib.suppress(OSError):
            _ip("link", "del", self._host_link)
        for namespace in self._namespaces:
            with contextlib.suppress(OSError):
                _ip("netns", "del", namespace)

    # -- links -------------------------------------------------------------------------

    def cut(self, source: str, target: str) -> None:
        """Drop all packets from one machine to another one."""
        if (source, target) not in self._cuts:
            self._rule("add", source, target)
            self._cuts.add((source, target))

    def cut_both(self, first: str, other: str) -> None:
        """Drop all packets between two machines."""
        self.cut(first, other)
        self.cut(other, first)

    def isolate(self, name: str) -> None:
        """Drop all packets from and to a machine."""
        for other in self._addresses:
            if other != name:
                self.cut_both(name, other)

    def heal(self) -> None:
        """End all cuts."""
        for source, target in self._cuts:
            self._rule("del", source, target)
        self._cuts.clear()

    def _rule(self, action: str, source: str, target: str) -> None:
        ends = ("from", self._addresses[source], "to", self._addresses[target])
        _ip("-n", self._router, "rule", action, *ends, "blackhole")
