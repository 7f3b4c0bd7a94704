"""Choice of an offer: the cheapest type and region that meets the spec, and those to fall back on. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from trainmaster.core.errors import NoCapacity, TargetError
from trainmaster.core.spec import JobSpec
from trainmaster.targets._provider import Offer

_SHOWN = 6  # offers named in a message


def rank_offers(
    offers: Sequence[Offer],
    spec: JobSpec,
    *,
    provider: str,
    file_systems: Mapping[str, str] | None = None,
    refused: Collection[tuple[str, str]] = (),
) -> list[Offer]:
    """Available offers that meet the spec, cheapest first; of equal price in the order of `rent.regions`.

    `refused` are types and regions that answered a launch with "no capacity". NoCapacity where every offer that would
    do is sold out; TargetError where none would do, however long one waits.
    """
    suitable = [offer for offer in offers if _meets(offer, spec)]
    if not suitable:
        raise TargetError(f"{provider}: no type meets the spec ({_words(spec)}); it offers {_list(offers)}")
    homes = _regions_of_file_systems(spec, file_systems or {}, provider)
    reachable = [offer for offer in suitable if homes is None or offer.region in homes]
    free = [offer for offer in reachable if offer.available and (offer.kind, offer.region) not in refused]
    if not free:
        where = f" in {', '.join(sorted(homes))}, where its file systems are" if homes is not None else ""
        raise NoCapacity(f"{provider}: no capacity{where} for {_words(spec)}: {_list(suitable)} sold out")
    regions = spec.rent.regions
    return sorted(
        free,
        key=lambda offer: (
            offer.price_cents_per_hour,
            regions.index(offer.region) if offer.region in regions else len(regions),
            offer.kind,
            offer.region,
        ),
    )


def _meets(offer: Offer, spec: JobSpec) -> bool:
    want = spec.rent
    gpus = want.gpus if want.gpus is not None else spec.resources.processes_per_node
    # An amount that the provider does not state is not known to be enough.
    return (
        offer.gpus >= gpus
        and (not want.types or offer.kind in want.types)
        and (not want.regions or offer.region in (*want.regions, ""))
        and (want.gpu is None or _is_model(want.gpu, offer.gpu))
        and (want.gpu_memory_gib is None or (offer.gpu_memory_gib or 0.0) >= want.gpu_memory_gib)
        and (want.memory_gib is None or (offer.memory_gib or 0.0) >= want.memory_gib)
        and (want.max_price_per_hour is None or offer.price_cents_per_hour <= want.max_price_per_hour * 100)
    )


def _is_model(wanted: str, described: str) -> bool:
    """Whether the description names the model as whole words: A10 is not A100."""
    words = r"\s+".join(re.escape(word) for word in wanted.split())
    return re.search(rf"(?<![A-Za-z0-9]){words}(?![A-Za-z0-9])", described, re.IGNORECASE) is not None


def _regions_of_file_systems(spec: JobSpec, known: Mapping[str, str], provider: str) -> set[str] | None:
    wanted = spec.rent.file_systems
    if not wanted:
        return None
    missing = [name for name in wanted if name not in known]
    if missing:
        raise TargetError(f"{provider}: no file system {', '.join(missing)}; there are {', '.join(known) or 'none'}")
    regions = {known[name] for name in wanted}
    if len(regions) > 1:
        raise TargetError(f"{provider}: rent.file_systems are in {', '.join(sorted(regions))}; a machine is in one")
    return regions


def _words(spec: JobSpec) -> str:
    want = spec.rent
    gpus = want.gpus if want.gpus is not None else spec.resources.processes_per_node
    parts = [f"{gpus} {want.gpu or 'GPU'}{'s' if gpus != 1 else ''}"]
    parts += [f"{want.gpu_memory_gib:g} GiB each"] if want.gpu_memory_gib is not None else []
    parts += [f"{want.memory_gib:g} GiB of memory"] if want.memory_gib is not None else []
    parts += [f"type {' or '.join(want.types)}"] if want.types else []
    parts += [f"in {' or '.join(want.regions)}"] if want.regions else []
    parts += [f"at most ${want.max_price_per_hour:,.2f} an hour"] if want.max_price_per_hour is not None else []
    return ", ".join(parts)


def _list(offers: Sequence[Offer]) -> str:
    kinds = sorted({(offer.price_cents_per_hour, offer.kind) for offer in offers})
    names = [f"{kind} (${cents / 100:,.2f})" for cents, kind in kinds]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) + more) or "nothing"
