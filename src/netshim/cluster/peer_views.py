"""Newer leaders, from the metadata of other brokers while the registry does not answer.

If a broker loses only its connection to the registry, the others replace it, and it
cannot read this from the registry. Without their reports, it would still name itself as
the leader when its clients request the metadata.

Rules:
- A broker reports only leader epochs that were written to the registry. Therefore it is
  safe to give up a leadership for a higher epoch. No report makes this broker a leader.
- Each request runs in a thread, because a broker may not answer for 30 s.
"""

from __future__ import annotations

import logging
import threading

import attrs

from logcore import LogcoreError
from logcore.metadata.checkpoint import Key
from netshim import wire
from netshim.cluster.broker_connections import Connect
from netshim.cluster.peer_requests import PeerConnection
from netshim.cluster.view import ClusterView

_log = logging.getLogger("netshim")


class PeerViews:
    """Asks the other brokers of a view for the leaders of all partitions.

    Blocks.
    """

    def __init__(self, node_id: int, connect: Connect) -> None:
        self._node_id = node_id
        #: Opens a connection to a broker.
        self._connect = connect
        #: Protects the two fields below, which the threads of requests change.
        self._mutex = threading.Lock()
        #: Brokers to which a request is in progress.
        self._asking: set[int] = set()
        #: The leader and the leader epoch of each partition, as far as reported.
        self._leaders: dict[Key, tuple[int, int]] = {}

    def newer_view(self, view: ClusterView) -> ClusterView:
        """Return a view with the newer leaders that were reported, and ask again.

        Does not block: the next call returns the new reports.
        """
        for number in view.brokers:
            if number != self._node_id:
                self._request_view(number)
        with self._mutex:
            # Reports are used once. The requests above return newer ones.
            leaders, self._leaders = self._leaders, {}
        states = dict(view.states)
        for key, (leader, epoch) in leaders.items():
            stored = states.get(key)
            # A report never makes this broker a leader, see the rules.
            if stored is None or leader in (self._node_id, -1):
                continue
            if epoch > stored.state.leader_epoch:
                _log.warning(
                    "%s-%d: broker %d leads in epoch %d, as another broker reports",
                    *key,
                    leader,
                    epoch,
                )
                state = attrs.evolve(stored.state, leader=leader, leader_epoch=epoch)
                states[key] = attrs.evolve(stored, state=state)
        return view if states == view.states else attrs.evolve(view, states=states)

    def _request_view(self, number: int) -> None:
        with self._mutex:
            if number in self._asking:
                return
            self._asking.add(number)
        threading.Thread(
            target=self._run,
            args=(number,),
            name=f"netshim-view-of-{number}",
            daemon=True,
        ).start()

    def _run(self, number: int) -> None:
        connection = PeerConnection(number, self._connect)
        try:
            request = wire.METADATA.Request(
                topics=None, allow_auto_topic_creation=False
            )
            response = connection.request(wire.METADATA, request)
            with self._mutex:
                for topic in response.topics:
                    for partition in topic.partitions:
                        key = topic.name, partition.partition_index
                        # Several brokers report. The highest epoch is the newest.
                        _, known_epoch = self._leaders.get(key, (-1, -1))
                        if partition.leader_epoch > known_epoch:
                            self._leaders[key] = (
                                partition.leader_id,
                                partition.leader_epoch,
                            )
        except LogcoreError as error:
            # The broker may be stopped. Other brokers report the same.
            _log.debug("metadata of broker %d: %s", number, error)
        finally:
            connection.close()
            with self._mutex:
                self._asking.discard(number)
