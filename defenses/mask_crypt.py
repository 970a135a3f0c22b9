"""MaskCrypt: clients vote for what to encrypt by how much it would help an attacker."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from bench.api import Client, Encrypted, Event, Facts, Local, Part, Strength, Unprotected
from bench.toolkit.settings import Limits
from defenses.encrypted_zone import EncryptedZone, Masks
from defenses.fedml_he import largest, ranks


@dataclass(kw_only=True, eq=False)
class MaskCrypt(EncryptedZone):
    """Encrypts the parameters that the clients' priority lists name first, no others.

    A client's priority is |gradient * (trained - broadcast)|: how much the loss would tell whoever
    replaced the value by the one he knows. Each round the lists are exchanged and merged in turn,
    one entry of every client after the other, until the share is full.

    Args:
        share: Of the parameters, that are encrypted, in [0, 1]; the rest is sent as it is.
        parameters: See `EncryptedZone`.

    Departure: the gradient is the mean of the local training's, not one at its end.
    Source: Hu, Li, MaskCrypt, IEEE TDSC 2024 (gradient-guided mask selection, mask consensus).
    """

    forms_model = "clients"
    strength = Strength(setting="share", weak=0.01, strong=1.0)
    source = "Hu, Li 2024 (MaskCrypt)"
    share: Annotated[float, Limits("of parameters, encrypted", least=0, most=1)] = 0.1

    def propose(self, client: Client, local: Local) -> Masks:
        priority = {
            n: (g * (local.end[n] - local.broadcast[n])).abs() for n, g in local.grad_sum.items()
        }
        return ranks(priority, self.share)

    def proposal_parts(self, proposal: Masks) -> dict[str, Part]:
        """A list of indices by falling priority: 32 bits per entry."""
        return {n: Part(values=r, present=r > 0, bits=32) for n, r in proposal.items()}

    def agree(self, masks: Sequence[Masks]) -> Masks:
        names, count = list(masks[0]), len(masks)
        turn: dict[str, Tensor] = {}
        for name in names:
            every = torch.stack([m[name] for m in masks]).double()
            place = torch.arange(count, device=every.device).view(-1, *[1] * (every.ndim - 1))
            turn[name] = torch.where(every > 0, every * count + place, torch.inf).amin(dim=0)
        chosen = largest({n: -t for n, t in turn.items()}, self.share)
        return {n: chosen[n] & turn[n].isfinite() for n in names}

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (
            Encrypted(what="each client's values in the encrypted zone"),
            Unprotected(what="the priority lists", why="they are computed from the data"),
            Unprotected(what="all other values", why="they are sent without noise"),
        )
