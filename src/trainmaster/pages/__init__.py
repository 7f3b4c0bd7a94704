"""Pages: one file each, a query that fills an answer shape of `api`. The folder is the registry.

Every module has `Page`, the shape, and `read(db, …) -> Page`. It knows nothing of HTML: the web, the reports and the
command line render the same shape. Parts that several pages share are in `parts/`.
"""

from __future__ import annotations

import pkgutil


def names() -> list[str]:
    """Every page: the modules of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)
