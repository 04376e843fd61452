"""Decides from the options of a command how the users of a console log in.

Rules:
- A console that other machines can reach needs TLS and a login.
- A console on the loopback address needs a login if an option requires one, or if access
  control lists are enforced.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from logcore.errors import InvalidConfigError
from netshim.console.access import ConsoleAccess
from netshim.http.host import LOOPBACK
from netshim.listeners import TlsSettings
from netshim.security.service import SecuritySettings
from netshim.security.stored import SecuritySnapshot


@attrs.frozen(kw_only=True)
class ConsoleSecurity:
    """The options of a console for its users."""

    tls: TlsSettings | None = None
    #: Whether a login is needed on this machine too.
    login: bool = False
    #: Whether the access control lists are enforced.
    acls: bool = False
    #: Principals that may do everything.
    super_users: tuple[str, ...] = ()

    def access(
        self, option: str, host: str, read_snapshot: Callable[[], SecuritySnapshot]
    ) -> ConsoleAccess:
        """Return the users and rules of a console that listens on a host.

        Raises:
            InvalidConfigError: the console would be open to a network without TLS, or a
                super user has no name, or the TLS files are unusable.
        """
        is_local = host in LOOPBACK
        if not is_local and self.tls is None:
            raise InvalidConfigError(
                f"{option}: outside of this machine, the console needs TLS and a login",
                expected="--tls-cert, and users of `netshim user add`; or 127.0.0.1 and "
                "an SSH tunnel such as `ssh -L 8080:localhost:8080 HOST`",
                found=host,
            )
        if self.tls is not None:
            self.tls.context()
        # Its constructor checks the names, as for a broker.
        SecuritySettings(super_users=self.super_users)
        return ConsoleAccess(
            read_snapshot=read_snapshot,
            needs_login=self.login or self.acls or not is_local,
            enforces_acls=self.acls,
            super_users=self.super_users,
        )
