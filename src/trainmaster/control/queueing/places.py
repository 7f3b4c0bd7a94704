"""One spelling for each place of our own queue, also of rows that have another."""

from __future__ import annotations

from trainmaster import targets
from trainmaster.store.capacity import machines
from trainmaster.store.database import Database


def respell(db: Database) -> None:
    """Give drains that were written with `..` in a path the one spelling that the queue looks for."""
    kept = {row.place for row in machines.list_machines(db)}
    changed = {place: after for place in kept if (after := spell(place)) != place}
    if changed:
        with db.write() as conn:
            for place, after in changed.items():
                machines.rename_place(conn, place, after)


def spell(place: str) -> str:
    """The one spelling of a place. Of a relative path nobody knows from where it was seen: it stays."""
    rooted = targets.split(place)[2].startswith("/") and targets.find_traits(place) is not None
    return targets.find_place(place) if rooted else place


def is_same(place: str, other: str) -> bool:
    """Whether two places are one. A relative path, as drains once kept it, may be any that ends so."""
    _, name, option = targets.split(place)
    alike = bool(option) and targets.split(other)[1] == name
    return place == other or (alike and other.endswith("/" + option.removeprefix("./")))
