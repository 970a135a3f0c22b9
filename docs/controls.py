"""Known-broken defenses, attacked by who takes what is sent for exact and by who knows them.

    python docs/controls.py DEFENSE [--dataset NAME] [--model NAME] [--init A] [--victims N]
                            [--batch N] [--budget N] [--seeds N] [--lr R] [--data-dir DIR]

sends the first step of each victim, undefended and defended, and prints a row of mean SSIM and mean
squared error of `idlg` for each of three observations: undefended; defended, as an
attacker sees it who knows of no defense; defended, as one sees it who knows its public mechanism.
The network begins with weights from U(-A, A).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from attacks.idlg import IDLG
from bench.contract.attack import Context
from bench.contract.defense import Client, Defense, Local
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import Message, Part
from bench.data import load_dataset
from bench.errors import UserError
from bench.metrics.score import score
from bench.models import build
from bench.protocols.observe import observe
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.protocols.split import start_federation
from bench.registry import discover
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator

_CPU = torch.device("cpu")


def ignorant(defense: Defense) -> Defense:
    """The defense for an attacker who knows of none: it declares nothing, and what it leaves out
    looks as zeros do."""

    class Ignorant(type(defense)):  # type: ignore[misc]
        def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
            return [
                m.with_parts({n: Part(values=p.values) for n, p in m.parts.items()})
                for m in super().upload(messages, local, client)
            ]

        def mechanisms(self) -> tuple[Mechanism, ...]:
            return ()

    defense.__class__ = Ignorant
    return defense


def attack(defense: Defense, given: argparse.Namespace, seed: int) -> dict[str, list[float]]:
    """Figures of all victims of one federation, by metric."""
    data = load_dataset(given.dataset, seed=seed, data_dir=given.data_dir)
    settings = {} if given.init is None else {"init": given.init}
    network = build(given.model, shape=data.shape, classes=data.classes, settings=settings)
    protocol = ProtocolSettings(name="fedavg", clients=given.victims, local_steps=1, lr=given.lr)
    order = torch.randperm(len(data.train_y), generator=generator(seed, "controls"))
    shares = order[: 24 * given.victims].split(24)
    federation = start_federation(
        "fedavg",
        network=network,
        defense=defense,
        data=[(data.train_x[s], data.train_y[s]) for s in shares],
        seed=seed,
        device=_CPU,
    )
    seen, truth = observe(
        federation,
        protocol=protocol,
        threat=ThreatSettings(victims=given.victims, batch=given.batch),
        aux_x=data.aux_x,
        defense_known={"name": given.defense, "settings": {}},
        names=("init",),
    )
    rng = generator(seed, "controls", "shadow")
    context = Context(
        rng=generator(seed, "controls", "attack"),
        device=_CPU,
        budget=given.budget,
        aux_x=data.aux_x,
        aux_y=data.aux_y,
        network=network,
        defense=defense,
        shadow=Rehearsals(seen=seen, network=network, defense=defense, rng=rng, device=_CPU),
    )
    answer = IDLG().run(seen, context)
    return score(answer, x=truth.x, y=truth.y, classes=data.classes, aux_x=data.aux_x).values


def main() -> None:
    """Print a defense's row for each attacker."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("defense")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--init", type=float)
    parser.add_argument("--victims", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budget", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    registry = discover()
    try:
        print("| observed | SSIM | MSE |\n| --- | --- | --- |")
        for name in ("undefended", "defended, not known", "defended, known"):
            each: dict[str, list[float]] = {"ssim": [], "mse": []}
            for seed in range(given.seeds):
                defense = registry.defense("none" if name == "undefended" else given.defense, {})
                defense = ignorant(defense) if name.endswith("not known") else defense
                figures = attack(defense, given, seed)
                each = {metric: values + figures[metric] for metric, values in each.items()}
            means = " | ".join(f"{sum(v) / len(v):.3g}" for v in each.values())
            print(f"| {name} | {means} |", flush=True)
    except UserError as error:
        raise SystemExit(f"controls: {error}") from error


if __name__ == "__main__":
    main()
