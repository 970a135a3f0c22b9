"""Split-federated learning: the first stages on the clients, the others on the server.

Every local step the clients send the activations of their cut layer (smashed data) and get the
loss's gradient by them back; every round they upload what they trained. With private labels the
head and its loss are on the clients too: the server sends its features down and gets the loss's
gradient by them. The server holds one set of weights and moves it once per step, by the mean
gradient over the batches that it ran.
Source: Thapa et al., arXiv:2004.12088 (the server's copies averaged after every step).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad, vmap

from bench.contract.defense import Client, Mixture, Submodel
from bench.contract.messages import SERVER, Message, Part, State, detached
from bench.errors import UserError
from bench.models import Network
from bench.protocols.federation import Federation, names_in
from bench.protocols.local_training import Group, LocalWork, Step
from bench.protocols.wire import FEATURES, SMASHED_GRADIENT
from bench.seeding import generator
from bench.toolkit.batches import soft_cross_entropy
from bench.toolkit.losses import SplitLoss

SMASHED, LABELS = "smashed", "labels"
FEATURES_GRADIENT = "features_gradient"


def start_federation(
    protocol: str,
    *,
    network: Network,
    cuts: Sequence[str] = (),
    labels: Literal["private", "shared"] = "private",
    **more: Any,
) -> Federation:
    """A federation of a protocol.

    Args:
        cuts: Under splitfed, the cuts that clients have in turn.
        labels: Under splitfed, whether labels are private or shared.

    Raises:
        UserError: For a cut that the network lacks.
    """
    if protocol != "splitfed":
        return Federation.start(network=network, **more)
    split = Split(network=network, cuts=tuple(cuts), labels=labels)
    return SplitFederation.start(network=network, split=split, **more)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Where the network is cut.

    Attributes:
        cuts: The last stages on the clients; client i has cuts[i % len(cuts)].
        labels: "private" (head and loss on the clients) or "shared" (labels sent with every batch).

    Raises:
        UserError: For a cut that the network lacks or that leaves the server nothing.
    """

    network: Network
    cuts: tuple[str, ...]
    labels: Literal["private", "shared"]

    def __post_init__(self) -> None:
        last = -1 if self.labels == "shared" else -2
        allowed = self.network.stages[:last]
        for cut in self.cuts:
            if cut not in allowed:
                raise UserError(
                    f"model {self.network.name} cannot be cut after '{cut}' with {self.labels} "
                    f"labels; it can be after {', '.join(allowed)}."
                )

    @property
    def features(self) -> str | None:
        """The server's last stage, or None for the network's."""
        return None if self.labels == "shared" else self.network.stages[-2]

    def stages_held(self, cut: str) -> tuple[str, ...]:
        """The stages that a client with this cut holds."""
        stages = self.network.stages
        return stages[: stages.index(cut) + 1] + (() if self.labels == "shared" else stages[-1:])

    def above(self, cut: str) -> str:
        """The stage after a cut."""
        stages = self.network.stages
        return stages[stages.index(cut) + 1]


@dataclass(kw_only=True)
class SplitFederation(Federation):
    """A federation whose network is cut; `cut` of each client says where.

    Attributes:
        split: Where the network is cut.
        server: The server's trained variables in this round.
        server_log: Those variables before each step of an observed round.
        server_memory: What the defense's `direction` remembers of the server's steps of the round.
    """

    split: Split
    server: dict[str, Tensor] = field(default_factory=dict)
    server_log: list[State] = field(default_factory=list)
    server_memory: State = field(default_factory=dict)

    def __post_init__(self) -> None:
        cuts = self.split.cuts
        self.clients = [replace(c, cut=cuts[i % len(cuts)]) for i, c in enumerate(self.clients)]

    @classmethod
    def client_stages(cls, network: Network, **more: Any) -> Mapping[str, Submodel]:
        split = more["split"]
        held = split.stages_held(max(split.cuts, key=network.stages.index))
        head = network.stages[-1]
        return {stage: "head" if stage == head else "bottom" for stage in held}

    def names_held(self, client: Client) -> list[str]:
        assert client.cut is not None
        return names_in(self.split.stages_held(client.cut), self.state)

    @property
    def head(self) -> list[str]:
        last = () if self.split.labels == "shared" else self.network.stages[-1:]
        return names_in(last, self.state)

    def _open_round(self) -> None:
        stages = self.network.stages
        shallowest = min(self.split.cuts, key=stages.index)
        clients = set(names_in(self.split.stages_held(shallowest), self.state))
        mine = {n: v for n, v in self.state.items() if n not in clients}
        self.server = detached(self.defense.receive(mine, self.const))
        self.server_log, self.server_memory = [], {}

    def _server_variables(self) -> State:
        return self.server

    def server_steps(self) -> Sequence[State]:
        return self.server_log

    def _settle(self, aggregated: State, messages: Sequence[Message]) -> State:
        """Layers that a client uploaded are the clients' mean, the others the server's own."""
        sent = {n for m in messages for n in m.sealed}
        for message in messages:
            for name, part in message.parts.items():
                if part.present is None or bool(part.present.any()):
                    sent.add(name)
        return {n: v if n in sent else self.server.get(n, v) for n, v in aggregated.items()}

    def _inspect(self, joined: Sequence[Client], work: LocalWork) -> None:
        """A client cannot compute the loss of its data without the server."""

    # --- one step -------------------------------------------------------------------------------
    def _take_step(self, step: Step) -> None:
        order = sorted(i for members in step.groups.values() for i in members)
        clients = [step.joined[i] for i in order]
        if "mix" in self.defense.owns and len(step.groups) > 1:
            shortest = min(clients, key=lambda c: len(c.y))
            raise UserError(
                f"batches can only be mixed if all are alike, but {shortest.id} holds "
                f"{len(shortest.y)} samples for batches of {step.work.batch}, or is cut elsewhere."
            )
        self._coordinate("step", step.wire, clients, {}, step.number)
        if step.wire.keeps:
            self.server_log.append(detached(self.server))
        sent: dict[str, tuple[Tensor, Part]] = {}  # activations, and what was sent of them
        draws = {key: self._draws(step, members) for key, members in step.groups.items()}
        samples = {key: self._samples(step, members) for key, members in step.groups.items()}
        for key, members in step.groups.items():
            x, y = samples[key]
            q = self._bottom(step, members, draws[key], x)
            for row, i in enumerate(members):
                own = q[row].requires_grad_()
                sent[step.joined[i].id] = own, self._send(step, step.joined[i], own, y[row])
        features, returned = self._serve(step, draws, {k: y for k, (_, y) in samples.items()})
        for key, members in step.groups.items():
            ids = [step.joined[i].id for i in members]
            by_q = torch.stack([_pull_back(*sent[c], returned[c]) for c in ids])
            f = torch.stack([features[c] for c in ids]) if features else None
            self._step_back(step, members, draws[key], *samples[key], by_q, f)

    def _bottom(self, step: Step, members: Sequence[int], draw: State, x: Tensor) -> Tensor:
        """Activations [M, B, ...] of the clients' batches."""
        cut = step.joined[members[0]].cut

        def run(variables: State, x: Tensor, draw: State) -> Tensor:
            weights = self.defense.realize(variables, self.const, draw)
            return self._part(weights, x, step, last=cut)

        with torch.no_grad():
            variables = step.variables(members)
            return self._for_each(run, len(members))(variables, x, draw)

    def _send(self, step: Step, client: Client, q: Tensor, y: Tensor) -> Part:
        part = self.defense.smashed(q, client)
        messages = [self._message(SMASHED, client.id, SERVER, step, part)]
        if self.split.labels == "shared":
            messages.append(self._message(LABELS, client.id, SERVER, step, Part(values=y)))
        step.wire.send(messages)
        return part

    def _message(self, kind: str, sender: str, receiver: str, step: Step, part: Part) -> Message:
        return Message(
            kind=kind,
            sender=sender,
            receiver=receiver,
            round=self.round,
            step=step.number,
            parts={kind: part},
        )

    # --- the server -----------------------------------------------------------------------------
    def _serve(
        self, step: Step, draws: Mapping[Group, State], targets: Mapping[Group, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run the batches, move the server's variables, send gradients by smashed data.

        Returns:
            By client, the features that it was sent (private labels), and the gradient of its
            batch's loss by its smashed data.
        """
        heard = step.wire.collect(SERVER)
        uploads = {m.sender: _leaf(m.parts[SMASHED]) for m in heard if m.kind == SMASHED}
        mixtures = self._mixtures(uploads, [m for m in heard if m.kind != SMASHED])
        names = [n for n, v in self.server.items() if v.is_floating_point()]
        leaves = {n: self.server[n].requires_grad_() for n in names}
        rng = generator(self.seed, SERVER, self.round, step.number)
        draw = self.defense.draw(leaves, self.const, rng)
        weights = self.defense.realize(leaves, self.const, draw)
        outputs = self._outputs(weights, mixtures, step)
        features: dict[str, Tensor] = {}
        if self.split.labels == "private":
            slopes, features = self._ask_heads(step, draws, mixtures, outputs, targets)
        else:
            slopes = [_loss_slope(o, m.targets) for o, m in zip(outputs, mixtures, strict=True)]
        values = [u.values for u in uploads.values()]
        grads = torch.autograd.grad(
            outputs, [*leaves.values(), *values], slopes, allow_unused=True, materialize_grads=True
        )
        moves: State = dict(zip(names, grads, strict=False))
        rate = step.work.lr / len(mixtures)
        if "direction" in self.defense.owns:  # of the mean, since a direction need not be linear
            mean, rate = {n: g / len(mixtures) for n, g in moves.items()}, step.work.lr
            moves, self.server_memory = self.defense.direction(
                mean, self.server_memory, step.number, self.const
            )
        for name, move in moves.items():
            self.server[name] = self.server[name].detach() - rate * move
        returned = {}
        for client, slope in zip(uploads, grads[len(names) :], strict=True):
            part = Part(values=slope)
            step.wire.send([self._message(SMASHED_GRADIENT, SERVER, client, step, part)])
            (answer,) = step.wire.collect(client)
            returned[client] = answer.parts[SMASHED_GRADIENT].values
        return features, returned

    def _mixtures(self, uploads: Mapping[str, Part], heard: Sequence[Message]) -> list[Mixture]:
        """The batches that the server runs: the defense's, or one per client."""
        cuts = {c.id: str(c.cut) for c in self.clients}
        if (mixed := self.defense.mix(uploads, heard)) is not None:
            return [replace(m, cut=cuts[m.members[0][0]]) for m in mixed]
        labels = {m.sender: m.parts[LABELS].values for m in heard if m.kind == LABELS}
        return [
            Mixture(
                smashed=torch.where(part.presence(), part.values, 0.0),
                cut=cuts[client],
                targets=labels.get(client),
                members=[(client, 1.0)],
            )
            for client, part in uploads.items()
        ]

    def _outputs(self, weights: State, mixtures: Sequence[Mixture], step: Step) -> list[Tensor]:
        """Return features or logits of every mixture; mixtures with the same cut run as one
        batch."""
        outputs: dict[int, Tensor] = {}
        for cut in {m.cut: None for m in mixtures}:
            mine = [i for i, m in enumerate(mixtures) if m.cut == cut]

            def run(z: Tensor, cut: str = cut) -> Tensor:
                ends = {"first": self.split.above(cut), "last": self.split.features}
                return self._part(weights, z, step, **ends)

            smashed = [mixtures[i].smashed for i in mine]
            if self.network.normalises and step.work.mode == "train":
                outputs |= {i: run(z) for i, z in zip(mine, smashed, strict=True)}
            else:
                done = run(torch.cat(smashed)).split([len(z) for z in smashed])
                outputs |= dict(zip(mine, done, strict=True))
        return [outputs[i] for i in range(len(mixtures))]

    def _ask_heads(
        self,
        step: Step,
        draws: Mapping[Group, State],
        mixtures: Sequence[Mixture],
        outputs: Sequence[Tensor],
        targets: Mapping[Group, Tensor],
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Send features to the clients' heads and get their losses' gradients back.

        Returns:
            The slope of every mixture's loss by its features, and the features by client.
        """
        features: dict[str, Tensor] = {}
        for mixture, output in zip(mixtures, outputs, strict=True):
            for client, _ in mixture.members:
                part = Part(values=output)
                step.wire.send([self._message(FEATURES, SERVER, client, step, part)])
                (heard,) = step.wire.collect(client)
                features[client] = heard.parts[FEATURES].values
        by_client = {c.id: c for c in step.joined}
        for key, members in step.groups.items():
            ids = [step.joined[i].id for i in members]
            f = torch.stack([features[c] for c in ids])

            def loss(f: Tensor, variables: State, y: Tensor, draw: State) -> Tensor:
                weights = self.defense.realize(variables, self.const, draw)
                logits = self._part(weights, f, step, first=self.network.stages[-1])
                return soft_cross_entropy(logits, y)

            slopes = vmap(grad(loss))(f, step.variables(members), targets[key], draws[key])
            for client, slope in zip(ids, slopes, strict=True):
                part = Part(values=self.defense.features_grad(slope, by_client[client]))
                step.wire.send([self._message(FEATURES_GRADIENT, client, SERVER, step, part)])
        heads = {m.sender: m.parts[FEATURES_GRADIENT].values for m in step.wire.collect(SERVER)}
        by_mixture = [sum(w * heads[c] for c, w in m.members) for m in mixtures]
        return [torch.as_tensor(slope) for slope in by_mixture], features

    def _part(self, weights: State, x: Tensor, step: Step, **ends: str | None) -> Tensor:
        """The network from the stage `first` to the stage `last` of `ends`."""
        mode = step.work.mode
        return self.network.run(weights, x, mode=mode, buffers=self.buffers, **ends)

    # --- the clients' gradients -----------------------------------------------------------------
    def _step_back(
        self, step: Step, members: list[int], draw: State, *stacks: Tensor | None
    ) -> None:
        """Move the clients' variables, given samples, targets, the losses' gradients by the
        activations, and (private labels) the features of the clients' heads, None without."""
        cut = str(step.joined[members[0]].cut)

        def gradient(
            variables: State, x: Tensor, y: Tensor, g: Tensor, f: Tensor | None, draw: State
        ) -> State:
            loss = SplitLoss(
                network=self.network,
                realize=self._realization(draw),
                mode=step.work.mode,
                buffers=self.buffers,
                cut=cut,
            )
            seen = (x,) if f is None else (x, f)
            return self.defense.gradient(loss, variables, seen, (g * len(g), y), draw)  # type: ignore[arg-type]

        held = self.names_held(step.joined[members[0]])
        each = self._for_each(gradient, len(members))
        self._descend(step, members, each(step.variables(members, held), *stacks, draw))


def _leaf(part: Part) -> Part:
    # A copy: the log holds what was delivered.
    return replace(part, values=part.values.clone().requires_grad_())


def _pull_back(q: Tensor, sent: Part, slope: Tensor) -> Tensor:
    """Return the loss's gradient by the activations q, from the gradient by the sent values."""
    return slope if sent.values is q else torch.autograd.grad(sent.values, q, slope)[0]


def _loss_slope(logits: Tensor, targets: Tensor | None) -> Tensor:
    """Gradient of the mean loss of a batch by its logits."""
    assert targets is not None, "shared labels came with every batch"
    leaf = logits.detach().requires_grad_()
    return torch.autograd.grad(soft_cross_entropy(leaf, targets), leaf)[0]
