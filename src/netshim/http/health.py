"""Whether a broker is alive, and whether it is ready for clients.

- `/health`: 200 while the event loop runs. A supervisor restarts a broker whose loop hangs.
- `/ready`: 200 if the broker can serve clients, else 503 with the reasons. A load balancer
  sends no clients to a broker that is not ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from netshim.http.host import BrokerCalls

if TYPE_CHECKING:
    from netshim.server import Server

#: Time after which an event loop that does not run counts as stuck.
STUCK_S: Final = 2.0
#: With less free space, the next append may fail.
MIN_FREE_BYTES: Final = 64 << 20


def unhealthy_reasons(server: Server) -> list[str]:
    """Return why a broker is not healthy. Any thread may call this."""
    stalled_s = server.stalled_s
    if stalled_s is None or stalled_s <= STUCK_S:
        return []
    return [f"the event loop has not run for {stalled_s:.0f} s"]


async def not_ready_reasons(server: Server) -> list[str]:
    """Return why a broker is not ready."""
    if server.stalled_s is None:
        return ["the broker is starting or stopping"]
    # Checked first, because a call in a stuck event loop would wait until its timeout.
    reasons = unhealthy_reasons(server)
    if reasons:
        return reasons
    calls = BrokerCalls(server.loop)
    reasons = await calls.call(lambda: _reasons_of_state(server))
    # The size of the disk and its free space.
    free_bytes = server.logdir.space()[1]
    if free_bytes < MIN_FREE_BYTES:
        reasons.append(
            f"{free_bytes >> 20} MiB of the disk are free; "
            f"expected {MIN_FREE_BYTES >> 20}"
        )
    return reasons


def _reasons_of_state(server: Server) -> list[str]:
    """Return the reasons that depend on state of the broker's thread."""
    state = server.broker.state
    reasons = [
        f"{topic}-{number}: an earlier write or sync failed"
        for (topic, number), log in state.logdir.host.known_logs().items()
        if log.has_failed
    ]
    # Always a member if the broker has no cluster.
    if not state.topology.is_member:
        reasons.append(
            "the broker is not registered in the cluster, or its registry does not answer"
        )
    return reasons
