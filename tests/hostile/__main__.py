"""`make hostile`: 300 seeded misbehaviours of jobs on SQLite and on PostgreSQL: 0 stuck, 0 wedged, 0 leaked.

ARGS='--seed 7 --count 30 --database sqlite' draws others; ARGS='--only 31' repeats one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from postgres import Postgres, binaries

from .misbehaviours import draw
from .run import Verdict, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", type=int, help="this number alone")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), help="not stated: both")
    chosen = parser.parse_args()
    wanted = draw(chosen.count, seed=chosen.seed)
    if chosen.only is not None:
        wanted = [one for one in wanted if one.number == chosen.only]
        print(wanted[0].script)
    programs = binaries()
    bad = 0
    for kind in [chosen.database] if chosen.database else ["sqlite", "postgresql"]:
        if kind == "postgresql" and programs is None:
            print("no PostgreSQL server here: its half is not run")
            continue
        home = Path(tempfile.mkdtemp(prefix=f"hostile-{kind}-"))
        server = Postgres(programs) if kind == "postgresql" and programs is not None else None
        try:
            database = server.create() if server is not None else f"sqlite+pysqlite:///{home}/trainmaster.db"
            verdict = run(home, database, wanted, at_once=chosen.at_once)
        finally:
            if server is not None:
                server.stop()
        _print(kind, verdict, home)
        bad += not verdict.clean
    return 1 if bad else 0


def _print(kind: str, verdict: Verdict, home: Path) -> None:
    print(
        f"{kind}: {len(verdict.ended)} ended, {len(verdict.stuck)} stuck, {len(verdict.wedged)} wedged, "
        f"{len(verdict.leaked)} leaked; longest event lag of another job {verdict.longest_lag_s:.1f} s"
    )
    for how, count in Counter(verdict.ended.values()).most_common():
        print(f"  {count:>4} {how}")
    for text in (*verdict.stuck, *verdict.wedged, *verdict.leaked):
        print(f"  {text}   (home {home})")


if __name__ == "__main__":
    raise SystemExit(main())
