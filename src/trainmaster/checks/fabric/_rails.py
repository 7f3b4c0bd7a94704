"""Equal ports of a node: which of them are rails, how many have a link, and at which rate most of them run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from trainmaster.checks.fabric._adapters import card_of
from trainmaster.checks.fabric._rdma_devices import LAYERS, Device, Port

LEAST = 4  # ours: so many equal adapters are the rails of a node; one or two without a link may be spares


@dataclass(frozen=True, slots=True, kw_only=True)
class Rails:
    """Ports of a node, in groups of one board and link layer."""

    devices: tuple[Device, ...]
    ports: tuple[Port, ...]
    lit: frozenset[str]  # ports that have a link
    aside: frozenset[str] = frozenset()  # devices that carry the default route: no rail, and no measure of one

    def device(self, port: Port) -> Device:
        return next(device for device in self.devices if device.name == port.device)

    def board(self, port: Port) -> str:
        return self.device(port).board

    def card(self, port: Port) -> str:
        """Card of a port: functions of one PCI device are one card."""
        address = self.device(port).address
        return port.device if address is None else card_of(address)

    def equal(self, port: Port) -> list[Port]:
        """Ports of its board and link layer, itself among them."""
        return [
            other
            for other in self.ports
            if self.board(other) == self.board(port)
            and other.link_layer == port.link_layer
            and (other == port or other.device not in self.aside)
        ]

    def cards(self, ports: Iterable[Port]) -> set[str]:
        return {self.card(port) for port in ports}

    def count(self, port: Port) -> tuple[int, int]:
        """Number of equal cards, and how many of them have a link."""
        equal = self.equal(port)
        return len(self.cards(equal)), len(self.cards(other for other in equal if other.name in self.lit))

    def has_link(self, port: Port) -> bool:
        """Whether its card has a link: then this port may be a second one without a cable."""
        card = self.card(port)
        return any(other.name in self.lit for other in self.ports if self.card(other) == card)

    def is_rail(self, port: Port) -> bool:
        """Whether a link of this port is meant: one of many equal cards has none, or most have one at this place."""
        if port.device in self.aside or self.count(port)[0] < LEAST:
            return False
        alike = [other for other in self.equal(port) if self._place(other) == self._place(port)]
        usual = 2 * sum(other.name in self.lit for other in alike) > len(alike)
        return not self.has_link(port) or (len(alike) >= LEAST and usual)

    def _place(self, port: Port) -> tuple[str, int]:
        """Which port of its card it is: function and number."""
        return (self.device(port).address or "").rpartition(".")[2], port.number

    def odd_layer(self, port: Port) -> str | None:
        """The link layer of a port, where its board is a rail of another layer; None if it is as it should be.

        Rails are 4, 8 or 16: seven InfiniBand adapters and an equal one of Ethernet lack a rail, eight and one do not.
        """
        equal = [other for other in self.ports if self.board(other) == self.board(port)]
        layers: dict[str, set[str]] = {}
        for other in equal:
            if other.link_layer in LAYERS:  # one that cannot be read is an adapter all the same
                layers.setdefault(other.link_layer, set()).add(self.card(other))
        if not self.board(port) or port.link_layer not in LAYERS or port.device in self.aside:
            return None
        usual = max(layers, key=lambda layer: len(layers[layer]))
        rails, cards = len(layers[usual]), len(self.cards(equal))
        if port.link_layer == usual or cards not in (LEAST, 2 * LEAST, 4 * LEAST):
            return None
        if 2 * rails <= cards or self.card(port) in layers[usual]:
            return None
        return f"link layer {port.link_layer}, where {rails} of {cards} equal adapters are {usual}"

    def usual_rate(self, port: Port) -> tuple[float | None, bool]:
        """Rate of most equal ports, and whether most have it: of halves, the faster one."""
        if port.device in self.aside:
            return None, False
        rates = Counter(other.rate_gbps for other in self.equal(port) if other.up and other.rate_gbps)
        most = max((rate for rate, count in rates.items() if 2 * count >= rates.total()), default=None)
        if most is None or rates.total() < 3:
            return None, False
        return most, 2 * rates[most] > rates.total()
