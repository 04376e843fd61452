"""A service that is not part of logcore, tested against every crash: pytest
examples/test_outbox.py

The outbox: a shop appends each order to a log, and accepts the order when the append has
returned. A courier reads the log, books each order with the warehouse, and stores its
progress in a second log. The warehouse remembers the numbers of booked orders, as any
idempotent service does.

These rules must hold whenever the power fails:
- An accepted order is finally booked, once, with the content that the customer sent.
- No order is booked that no customer sent.
"""

from __future__ import annotations

import pytest

import logcore
from logcore.testing import CrashTestError, Fault, FaultPlan, SimulatedDisk, explore


class Shop:
    """Accepts orders: an order is accepted when place() returns."""

    def __init__(self, fs, durability="group"):
        self._orders = logcore.open(
            "shop/orders-0", create=True, durability=durability, fs=fs
        )

    def place(self, order: bytes) -> int:
        return self._orders.append(order).offset

    def close(self) -> None:
        self._orders.close()


class Courier:
    """Books orders, beginning at its stored progress.

    After a crash it may book an order again, but skips none.
    """

    def __init__(self, fs, warehouse: dict[int, bytes]):
        self._orders = logcore.open("shop/orders-0", create=True, fs=fs)
        self._notes = logcore.open("shop/notes-0", create=True, fs=fs)
        self._warehouse = warehouse

    def waiting(self) -> dict[int, bytes]:
        """Return the orders that are not yet recorded as booked."""
        return {
            order.offset: order.value or b""
            for order in self._orders.read(self._next())
        }

    def deliver(self) -> None:
        for number, order in self.waiting().items():
            self._warehouse.setdefault(number, order)
        self._notes.append(b"%d" % self._orders.high_watermark)

    def _next(self) -> int:
        end = self._notes.log_end_offset
        return int(self._notes.get(end - 1).value or b"0") if end else 0

    def close(self) -> None:
        self._orders.close()
        self._notes.close()


ORDERS = [b"anna: 4 apples", b"ben: 2 pears", b"cleo: 1 melon"]


class World:
    """The parts that survive a crash: the customers, and the warehouse, which is another
    service.
    """

    def __init__(self, durability="group"):
        self.durability = durability
        self.warehouse: dict[int, bytes] = {}

    def run(self, disk, promise) -> None:
        shop = Shop(disk, self.durability)
        for order in ORDERS[:2]:
            promise((shop.place(order), order))
        shop.close()
        courier = Courier(disk, self.warehouse)
        courier.deliver()
        courier.close()
        shop = Shop(disk, self.durability)
        promise((shop.place(ORDERS[2]), ORDERS[2]))
        shop.close()

    def recover(self, disk) -> dict[int, bytes]:
        """Return the orders that a restarted courier will book with the warehouse."""
        courier = Courier(disk, {})
        waiting = courier.waiting()
        courier.close()
        return waiting

    def check(self, promised, waiting) -> None:
        booked = {**waiting, **self.warehouse}  # the warehouse keeps the first booking
        for number, order in promised:
            assert booked.get(number) == order, f"accepted and not booked: {order!r}"
        for number, order in booked.items():
            assert ORDERS[number] == order, f"booked and never ordered: {order!r}"


def test_every_accepted_order_is_booked():
    world = World()
    report = explore(world.run, world.recover, world.check, limit=20)
    print(report)
    assert report.states > 200


def test_shop_that_does_not_wait_for_the_disk_fails():
    """A service with durability="os" measures fast, and the test finds its bug."""
    world = World(durability="os")
    with pytest.raises(CrashTestError, match="accepted and not booked"):
        explore(world.run, world.recover, world.check, limit=20)


def test_a_full_disk_refuses_the_order_and_keeps_the_others():
    disk = SimulatedDisk()
    shop = Shop(disk)
    shop.place(ORDERS[0])
    disk.faults = FaultPlan(Fault("pwrite", 28, path="*.log"))  # ENOSPC, once
    with pytest.raises(logcore.DiskFullError):
        shop.place(ORDERS[1])
    shop.place(ORDERS[2])  # the disk has free space again
    shop.close()
    warehouse: dict[int, bytes] = {}
    courier = Courier(disk, warehouse)
    courier.deliver()
    courier.close()
    assert warehouse == {0: ORDERS[0], 1: ORDERS[2]}
