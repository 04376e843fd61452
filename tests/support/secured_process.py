"""A broker in a separate process, with TLS, users, rules and quotas.

It is set up by the commands of docs/security.md.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import trustme

from support.client import DEADLINE_S, Client

USER = "alice"
PASSWORD = "a password of alice"
#: Quotas that no client of the tests reaches.
_QUOTAS = (
    "producer_byte_rate=1e12",
    "consumer_byte_rate=1e12",
    "request_percentage=1e9",
    "controller_mutation_rate=1e9",
)


@attrs.frozen
class SecuredProcess:
    """A running broker."""

    process: subprocess.Popen[str]
    #: SASL_SSL or SASL_PLAINTEXT.
    protocol: str
    port: int
    authority: trustme.CA
    ca_file: Path
    cert_file: Path
    #: Lines that the process has written to stderr.
    lines: queue.Queue[str]

    def connect(self) -> Client:
        """Return a client that is logged in."""
        client = Client(self.port)
        if self.protocol == "SASL_SSL":
            client.use_tls(self.ca_file)
        client.log_in(USER, PASSWORD)
        return client

    def client_config(self) -> dict[str, Any]:
        """Return the settings of a client of librdkafka."""
        return {
            "bootstrap.servers": f"localhost:{self.port}",
            "security.protocol": self.protocol,
            "ssl.ca.location": str(self.ca_file),
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
        }

    def renew_certificate(self) -> None:
        """Replace the file of the broker's certificate."""
        certificate = self.authority.issue_cert("localhost", "127.0.0.1")
        certificate.private_key_and_cert_chain_pem.write_to_path(self.cert_file)

    def wait_for_line(self, text: str) -> str:
        """Return the next line of stderr that contains a text."""
        while True:
            line = self.lines.get(timeout=DEADLINE_S)
            if text in line:
                return line


def _run(*arguments: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "netshim", *map(str, arguments)],
        check=True,
        stdout=subprocess.DEVNULL,
    )


@contextmanager
def secured_process(
    data: Path, protocol: str = "SASL_SSL", *options: str
) -> Iterator[SecuredProcess]:
    """Run a broker over a directory. The user may do everything except change users, rules
    and quotas.

    `options` are further options of netshim serve.
    """
    authority = trustme.CA()
    ca_file = data.with_name("ca.pem")
    authority.cert_pem.write_to_path(ca_file)
    cert_file = data.with_name("broker.pem")
    cert_file.touch(mode=0o600)
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(cert_file)
    password_file = data.with_name("password")
    password_file.write_text(PASSWORD)
    _run("user", "add", data, USER, "--password-file", password_file)
    names = ("--topic", "*", "--group", "*", "--transactional-id", "*")
    _run("acl", "add", data, f"User:{USER}", "--operation", "all", *names)
    cluster = ["create", "describe", "idempotentwrite", "alterconfigs"]
    operations = [part for name in cluster for part in ("--operation", name)]
    _run("acl", "add", data, f"User:{USER}", *operations, "--cluster")
    _run("quota", "set", data, "--user-default", *_QUOTAS)
    command = [sys.executable, "-m", "netshim", "serve", str(data)]
    command += ["--listener", f"{protocol}://127.0.0.1:0", "--acls", *options]
    command += ["--sasl", "PLAIN,SCRAM-SHA-256"]
    if protocol == "SASL_SSL":
        command += ["--tls-cert", str(cert_file)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    lines: queue.Queue[str] = queue.Queue()
    stderr = process.stderr

    def read() -> None:
        for line in stderr:
            lines.put(line)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        first = process.stdout.readline()
        found = re.search(r":(\d+)\s*$", first)
        assert found is not None, (first, process.poll())
        port = int(found[1])
        yield SecuredProcess(
            process, protocol, port, authority, ca_file, cert_file, lines
        )
    finally:
        process.kill()
        process.wait()
        reading.join()
        process.stdout.close()
        stderr.close()
