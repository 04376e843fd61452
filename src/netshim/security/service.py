"""The security of one broker: its settings, and the latest stored users and rules.

Rules:
- The broker's thread reads the fields here; it never blocks. Stored users, rules
  and quotas are read and changed in worker threads, and then published together.
- Without --acls there is no authorizer: every user who may connect may do everything.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

import attrs

from logcore.errors import InvalidConfigError
from netshim.security import sasl, scram
from netshim.security.acls import Acl, AclIndex, AclOperation, ResourceType
from netshim.security.principals import MappingRules
from netshim.security.quotas import Quotas
from netshim.security.sasl import Authenticator, PasswordCache
from netshim.security.stored import SecuritySnapshot, SecurityStore
from netshim.security.tokens import JwtVerifier
from netshim.session import BROKER_PRINCIPAL, ClientSession

_log = logging.getLogger("netshim")
#: Stored users, rules and quotas are read again after this time, even if no change was
#: reported.
_RELOAD_MS: Final = 5_000


@attrs.frozen(kw_only=True)
class SecuritySettings:
    """The security options of `netshim serve`."""

    #: Mechanisms of SASL listeners.
    mechanisms: tuple[str, ...] = ("SCRAM-SHA-256", "SCRAM-SHA-512")
    #: Principals that may do everything, such as "User:admin".
    super_users: tuple[str, ...] = ()
    #: Whether operations need an access control list that allows them.
    enforces_acls: bool = False
    #: Lifetime of an authentication; 0 for no limit. Kafka's
    #: connections.max.reauth.ms.
    connections_max_reauth_ms: int = 0
    #: Delay of the response to a failed authentication. Kafka's
    #: connection.failed.authentication.delay.ms.
    failed_delay_ms: int = 100
    #: Iterations of SCRAM that an unknown user appears to have while no user exists.
    scram_iterations: int = scram.MIN_ITERATIONS
    #: Rules for the subjects of client certificates.
    principal_mapping: MappingRules = attrs.field(factory=MappingRules)
    #: Keys of bearer tokens: a file or an https URL. Required for OAUTHBEARER.
    oauth_jwks: str | None = None
    oauth_audience: str | None = None
    oauth_issuer: str | None = None
    #: The claim that contains the user name.
    oauth_claim: str = "sub"

    def __attrs_post_init__(self) -> None:
        for mechanism in self.mechanisms:
            if mechanism not in sasl.MECHANISMS:
                raise InvalidConfigError(
                    "SASL mechanism",
                    expected=" or ".join(sasl.MECHANISMS),
                    found=repr(mechanism),
                )
        for principal in self.super_users:
            principal_type, separator, name = principal.partition(":")
            if principal_type != "User" or not separator or not name:
                raise InvalidConfigError(
                    "super user", expected="User:name", found=repr(principal)
                )
        if sasl.OAUTHBEARER in self.mechanisms and self.oauth_jwks is None:
            raise InvalidConfigError(
                "OAUTHBEARER needs the keys of its tokens",
                expected="--oauth-jwks with a file or an https URL",
                found="none",
            )


class Security:
    """The settings, and the stored users, rules and quotas that are in effect."""

    def __init__(
        self,
        settings: SecuritySettings,
        *,
        open_store: Callable[[], SecurityStore],
        random: Callable[[int], bytes],
        wall_ms: Callable[[], int],
    ) -> None:
        """Create the security of a broker without stored users or rules; see publish().

        `open_store` blocks, and is called once. `wall_ms` returns the wall clock.
        """
        self.settings = settings
        self.mechanisms = settings.mechanisms
        self.failed_delay_ms = settings.failed_delay_ms
        #: Failed authentications by mechanism. Those of TLS are listed as "TLS", and
        #: mechanisms that are not served as "other".
        self.failures: Counter[str] = Counter()
        self.connections_max_reauth_ms = settings.connections_max_reauth_ms
        self.wall_ms = wall_ms
        #: The stored users, rules and quotas that are in effect.
        self.snapshot = SecuritySnapshot()
        #: Number of changes of the rules.
        self.rules_version = 0
        #: The rules; None if no rule is enforced.
        self.acls: AclIndex | None = None
        if settings.enforces_acls:
            self.acls = self._index(())
        self.quotas = Quotas()
        self._open_store = open_store
        #: None until store() opens it.
        self._store: SecurityStore | None = None
        #: When the registry was last read.
        self._loaded_ms: int | None = None
        tokens = None
        if settings.oauth_jwks is not None:
            tokens = JwtVerifier(
                settings.oauth_jwks,
                settings.oauth_audience,
                settings.oauth_issuer,
                settings.oauth_claim,
            )
        self.authenticator = Authenticator(
            snapshot=lambda: self.snapshot,
            random=random,
            passwords=PasswordCache(random(32)),
            iterations=settings.scram_iterations,
            tokens=tokens,
        )

    @property
    def reauthenticates(self) -> bool:
        """Whether clients may authenticate again on a connection."""
        return self.connections_max_reauth_ms > 0

    @property
    def has_store(self) -> bool:
        """Whether stored users, rules or quotas are used."""
        return self._store is not None

    # -- in worker threads, one at a time -----------------------------------------------

    def store(self) -> SecurityStore:
        """Return the store, opened at the first call. May block."""
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def refresh(self, now_ms: int) -> SecuritySnapshot | None:
        """Return the stored users, rules and quotas if they may have changed. May block.

        `now_ms` is a monotonic clock. Returns None while no store is open.
        """
        if self._store is None:
            return None
        is_old = self._loaded_ms is None or now_ms - self._loaded_ms >= _RELOAD_MS
        if not is_old and not self._store.has_changed():
            return None
        # Set first, so that a load that fails is not repeated at every call.
        self._loaded_ms = now_ms
        return self._store.load()

    def close(self) -> None:
        """Close the store's watch."""
        if self._store is not None:
            self._store.close()

    # -- in the broker's thread --------------------------------------------------------

    def rules(self) -> AclIndex:
        """Return the current rules. Only for brokers that enforce rules."""
        assert self.acls is not None, "no rule is enforced"
        return self.acls

    def may_describe(self, session: ClientSession, topic: str) -> bool:
        """Return whether the current rules let a client see that a topic exists."""
        return self.may(session, AclOperation.DESCRIBE, topic)

    def may(self, session: ClientSession, operation: AclOperation, topic: str) -> bool:
        """Return whether a client may perform an operation on a topic, by the rules as
        they are now.
        """
        return self.acls is None or self.acls.allows(
            session.principal,
            session.client_address,
            operation,
            ResourceType.TOPIC,
            topic,
        )

    def may_follow(self, session: ClientSession) -> bool:
        """Return whether a client may fetch as a follower, without a further check."""
        return self.acls is None or session.principal == BROKER_PRINCIPAL

    def _index(self, acls: tuple[Acl, ...]) -> AclIndex:
        return AclIndex(acls, (*self.settings.super_users, BROKER_PRINCIPAL))

    def publish(self, snapshot: SecuritySnapshot) -> None:
        """Use these users, rules and quotas from now on."""
        if snapshot == self.snapshot:
            return
        if self.acls is not None and snapshot.acls != self.acls.acls:
            self.acls = self._index(snapshot.acls)
            self.rules_version += 1
        self.quotas.set_bounds(snapshot.quotas)
        self.snapshot = snapshot
