"""Objectives as attacks build them, for tests of the engine."""

import torch

from attacks.engine.encoding import Encoding
from attacks.engine.evidence import Distance, Evidence
from attacks.engine.matching import Matcher
from attacks.engine.observation import parse_view
from attacks.engine.private import with_private_parts
from attacks.engine.terms import total_variation as variation
from bench.contract.attack import Context, Seen


def evidence_for(
    seen: Seen, ctx: Context, *, dtype: torch.dtype = torch.float32,
    distance: Distance = "likelihood",
) -> Evidence:  # fmt: skip
    """What was seen, with what clients kept to themselves estimated."""
    found = with_private_parts(parse_view(seen), ctx)
    return Evidence(found, ctx, dtype=dtype, distance=distance)


def matcher_for(
    seen: Seen, ctx: Context, *, dtype: torch.dtype, distance: Distance = "likelihood",
    total_variation: float = 0.0,
) -> Matcher:  # fmt: skip
    """The objective over plain images."""
    evidence = evidence_for(seen, ctx, dtype=dtype, distance=distance)
    samples = evidence.clients.samples
    encoding = Encoding(ctx, samples=samples, dtype=dtype)
    beliefs = [variation(total_variation)] if total_variation else []
    return Matcher(evidence, encoding, beliefs=beliefs)
