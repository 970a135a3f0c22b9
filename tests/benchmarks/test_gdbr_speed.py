"""GDBR's cost behind a hidden head as a ratio to iLRG's with the head in the open.

    uv run pytest tests/benchmarks/test_gdbr_speed.py --benchmark-only -s

Of eight batches of an untrained LeNet; printed, not asserted. GDBR's time is that of 60 rehearsals.
"""

from typing import Any

from attacks.gdbr import GDBR
from attacks.ilrg import ILRG
from bench.data import load_dataset
from defenses.none import NoDefense
from tests.benchmarks.timing import TRIES, best_of
from tests.conftest import network_for, rehearsing_context, seen_under
from tests.gdbr_figures import HiddenHead


def test_gdbr_against_ilrg(benchmark: Any) -> None:
    data = load_dataset("digits", seed=0)
    network = network_for(data, init=0.25)
    seen, ctx = [], []
    for defense in (NoDefense(), HiddenHead()):
        seen.append(seen_under(data, network, defense, batch=8)[0])
        ctx.append(rehearsing_context(data, network, defense, seen[-1]))
    ilrg, _ = best_of(lambda: ILRG().run(seen[0], ctx[0]))
    benchmark.pedantic(lambda: GDBR().run(seen[1], ctx[1]), rounds=TRIES, warmup_rounds=1)
    seconds = benchmark.stats.stats.min
    print(f"\nGDBR {seconds:.2f} s, iLRG {ilrg:.3f} s ({seconds / ilrg:.0f}x)")
