"""The leaderboard's rows by table, with a title each."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.protocols.settings import TRAINING
from bench.records import Row, canonical, short


def tables(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return rows by table, with a title each; tables of one title get the differing settings
    added."""
    titles: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        title = (
            f"{row.protocol} of {row.protocol_settings.clients} clients · {row.data} · "
            f"{row.model} · {_round(row)}"
        )
        table = canonical(_circumstances(row))
        titles.setdefault(title, {}).setdefault(table, []).append(row)
    out = []
    for title, groups in titles.items():
        differing = _differing([_circumstances(members[0]) for members in groups.values()])
        for more, members in zip(differing, groups.values(), strict=True):
            out.append((" · ".join([title, *more]), members))
    return out


def _round(row: Row) -> str:
    """final round; after 20 rounds; rounds of the training."""
    if row.checkpoint == TRAINING:
        return "rounds of the training"
    _, dash, played = row.checkpoint.partition("-")
    return f"after {played} rounds" if dash else f"{row.checkpoint} round"


def work(rows: Sequence[Row]) -> str:
    """Return what the attacked rounds and the training of a table's rows hold: observed: batch 1,
    one step; trained: batch 32, five epochs."""
    observed = " or ".join(dict.fromkeys(r.observed for r in rows if r.observed))
    trained = " or ".join(dict.fromkeys(r.protocol_settings.work for r in rows))
    return f"observed: {observed or 'not known'}; trained: {trained}"


def _circumstances(row: Row) -> Mapping[str, Any]:
    """Return what a table's rows have in common beside its title, by descriptive names."""
    return {
        "suite": row.suite,
        "dataset": row.dataset,
        **{f"data {k}": v for k, v in row.dataset_settings.items()},
        **{f"model {k}": v for k, v in row.model_settings.items()},
        **row.protocol_settings.model_dump(),
    }


def _differing(all_: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return "key=value" of each dictionary where not all agree."""
    known = dict.fromkeys(k for d in all_ for k in d)
    keys = [k for k in known if any(d.get(k) != all_[0].get(k) for d in all_)]
    return [[f"{k}={short(d.get(k))}" for k in keys] for d in all_]


def attack_metrics(rows: Sequence[Row]) -> dict[str, str]:
    """Return the metric that each attack's column shows: SSIM of attacks on images, MSE where there
    are no images, LnAcc of attacks on counts only."""
    out = {}
    for name in dict.fromkeys(n for r in rows for n in r.attacks):
        has = {m for r in rows if name in r.attacks for m in r.attacks[name].scores}
        out[name] = next((m for m in ("ssim", "mse", "lnacc") if m in has), "ssim")
    return out


def idle(rows: Sequence[Row]) -> dict[str, str]:
    """Return the attacks that apply to no row, with the reason: only the files have their
    columns."""
    reasons: dict[str, str] = {}
    for name in sorted({n for r in rows for n in r.attacks}):
        entries = [r.attacks[name] for r in rows if name in r.attacks]
        if all(e.status == "not_applicable" for e in entries):
            reasons[name] = str(entries[0].reason)
    return reasons


def same_training(row: Row) -> str:
    """Return what rows of one setting share that differ only in the checkpoint."""
    data, model = (row.dataset, row.dataset_settings), (row.model, row.model_settings)
    own = (row.suite, row.defense, row.settings)
    return canonical([row.protocol_settings, *data, *model, *own])
