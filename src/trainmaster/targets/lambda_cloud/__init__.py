"""Target `lambda`: machines rented from Lambda Cloud for each attempt, reached over SSH, returned at its end.

settings.py   environment variables, API key        client.py   the API over HTTP, held to the vendor's schema
provider.py   its words become ours                 rates.py    one request a second, one launch in twelve
errors.py     refusals typed by the vendor's code
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmaster.core.errors import UsageError
from trainmaster.targets._queueing import NO_NAME, OWN_QUEUE
from trainmaster.targets._traits import Account, Traits

if TYPE_CHECKING:
    from trainmaster.targets._rented import Rented

TRAITS = Traits(
    title="machines rented from Lambda Cloud",
    option="none",
    instead={"remedy": "return the machine with `trainmaster reap`; its GPUs are remembered as bad"},
    queue=OWN_QUEUE,
    no_queue=NO_NAME,
    no_spares="a machine is rented when it is needed; `limits.attempts` rents another, and the run resumes",
)


def create(options: str) -> Rented:
    """The target over the account of the API key."""
    from trainmaster.targets._rented import Rented
    from trainmaster.targets.lambda_cloud.provider import LambdaCloud

    if options:
        raise UsageError(f"target: lambda takes no options, got {options!r}; use `rent:` of the spec")
    return Rented("lambda", LambdaCloud)


def charges(options: str, user: str | None) -> bool:  # noqa: ARG001 (of every account)
    """Every machine has a price, known once an offer is chosen."""
    return True


def runs_as(options: str, user: str | None) -> Account:  # noqa: ARG001 (a machine has no other jobs)
    """The login of a machine that is rented for one attempt and returned at its end."""
    create(options)
    return Account(name="a machine of its own", alone=True)
