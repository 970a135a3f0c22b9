"""The leaderboard's rows by table, and as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from bench.metrics.named import METRICS
from bench.records import to_line
from bench.report.leaderboard import seeds_of

Row = dict[str, Any]
LEGEND = (
    "SSIM and LnAcc: what the attack recovered, mean [95 % interval]; lower is safer. "
    "floor: what needs no leak (mean public image / class mean given the label; chance). "
    "eps proven: for one training record over the whole run; inf = nothing proven."
)
ERROR_LEGEND = (
    "MSE (of records; floor: mean public record / class mean given the label): higher is safer, "
    "0 is a perfect copy."
)
AUDIT_LEGEND = (
    "eps audited: what an attack on one release certifies at least (+: limited by its draws; "
    "!: more than claimed or proven)."
)
PERSONAL_LEGEND = (
    "personal (own) accuracy: of each client's own network on test samples in its own label "
    "shares, mean over clients; accuracy '-': not all of it is ever uploaded, so no common model."
)


def tables(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by table, with a title each; what else differs between tables of one title is added."""
    titles: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        clients = row["protocol_settings"]["clients"]
        title = (
            f"{row['protocol']} of {clients} clients · {row['dataset']} · {row['model']} · "
            f"{row['checkpoint']} round"
        )
        table = json.dumps(_circumstances(row), sort_keys=True)
        titles.setdefault(title, {}).setdefault(table, []).append(row)
    out = []
    for title, alike in titles.items():
        differing = _differing([_circumstances(members[0]) for members in alike.values()])
        for more, members in zip(differing, alike.values(), strict=True):
            out.append((" · ".join([title, *more]), members))
    return out


def _circumstances(row: Row) -> dict[str, Any]:
    """What a table's rows have in common beside its title, by telling names."""
    return {
        "suite": row["suite"],
        **{f"data {k}": v for k, v in row.get("dataset_settings", {}).items()},
        **{f"model {k}": v for k, v in row.get("model_settings", {}).items()},
        **row["protocol_settings"],
    }


def _differing(all_: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Of each dictionary "key=value" where not all agree."""
    keys = [k for k in dict.fromkeys(k for d in all_ for k in d)
            if any(d.get(k) != all_[0].get(k) for d in all_)]  # fmt: skip
    return [[f"{k}={short(d.get(k))}" for k in keys] for d in all_]


def setting(row: Row) -> str:
    """spm(epsilon=1.5, variant=printed)."""
    inner = ", ".join(f"{k}={short(v)}" for k, v in row["settings"].items())
    return f"{row['defense']}({inner})" if inner else row["defense"]


def attack_columns(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(attack, metric) columns: SSIM of attacks on images, MSE where there are no images, LnAcc
    of attacks on counts alone."""
    out = []
    for name in dict.fromkeys(n for r in rows for n in r["attacks"]):
        entries = [r["attacks"][name] for r in rows if name in r["attacks"]]
        metric = next((m for m in ("ssim", "mse", "lnacc") if any(e[m] for e in entries)), "ssim")
        out.append((name, metric))
    return out


TITLES = {"ssim": "SSIM", "mse": "MSE", "lnacc": "LnAcc"}


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and body of one table, as text."""
    columns = attack_columns(rows)
    personal = any_personalised(rows)
    header = ["#", "defense", "accuracy", *(["personal accuracy"] if personal else [])]
    header += ["eps claimed", "eps proven", "eps audited"]
    header += [f"{name} {TITLES[metric]}" for name, metric in columns] + [
        "floor",
        "worst",
        "flags",
    ]
    body = []
    for row in rows:
        line = [
            str(row["rank"] or "-"),
            setting(row),
            interval(row["accuracy"]),
            *([interval(row["personal_accuracy"])] if personal else []),
            f"{short(row['eps_claimed'])} /{row['unit']}" if row["unit"] else "-",
            short(row["eps_record"]),
            audited(row),
        ]
        line += [entry_text(row["attacks"].get(name), metric) for name, metric in columns]
        floors = [f"{TITLES[m]} {text}" for m, text in floor_texts(row, columns).items()]
        line += [", ".join(floors) or "-", _worst(row), "; ".join(row["flags"])]
        body.append(line)
    return header, body


def audited(row: Row) -> str:
    """5.9+!: the audit's bound, whether the draws limit it, whether it refutes claim or proof."""
    found = row.get("audit")
    if not found:
        return "-"
    refuted = "violated" in (found["verdict_claim"], found["verdict_proof"])
    limited = "+" if found["eps_at_least"] else ""
    return f"{float(found['eps_audited']):.2g}{limited}{'!' if refuted else ''}"


def any_personalised(rows: Sequence[Row]) -> bool:
    """Whether a column of clients' own accuracies tells more than the common one."""
    return any(r["personalised"] for r in rows)


def any_errors(rows: Sequence[Row]) -> bool:
    """Whether an attack's figures are errors of records, which are safer the larger they are."""
    return any(m == "mse" for _, members in tables(rows) for _, m in attack_columns(members))


def interval(value: dict[str, float] | None, metric: str = "ssim") -> str:
    """0.910 [0.88, 0.94]; of an MSE 4.1e-8 [3.9e-8, 4.4e-8]."""
    if value is None:
        return "-"
    if metric == "mse":
        lo, hi = (error_number(value[k], 2) for k in ("lo", "hi"))
        return f"{error_number(value['mean'])} [{lo}, {hi}]"
    return f"{value['mean']:.3f} [{value['lo']:.2f}, {value['hi']:.2f}]"


def error_number(value: float, digits: int = 3) -> str:
    """An error of records, which spans decades, with so many significant digits: 4.1e-8."""
    return _trimmed(f"{float(value):.{digits}g}")


def _trimmed(number: str) -> str:
    """4.1e-08 as 4.1e-8, 1e+03 as 1e3."""
    return number.replace("e+0", "e").replace("e-0", "e-")


def entry_text(entry: dict[str, Any] | None, metric: str) -> str:
    if entry is None:
        return "-"
    if entry[metric] is None:
        return {"not_applicable": "n/a"}.get(entry["status"], entry["status"])
    lost = f" ({entry['failed']} failed)" if entry["failed"] else ""
    return interval(entry[metric], metric) + lost


def floor_texts(row: Row, columns: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Floors by metric of the columns: {"ssim": "0.26/0.66"} (mean / class-mean image)."""
    texts = {}
    for metric in dict.fromkeys(m for _, m in columns):
        entries = [row["attacks"][n] for n, m in columns if m == metric and n in row["attacks"]]
        floors: dict[str, float] = next((e["floor"] for e in entries if e["floor"]), {})
        if metric in floors:
            given = floors.get(f"{metric}_class_mean")
            shown = [v for v in (floors[metric], given) if v is not None]
            texts[metric] = "/".join(two_digits(v, metric) for v in shown)
    return texts


def two_digits(value: float, metric: str) -> str:
    """0.52; of errors that would be 0.00 one digit, 7e-17: a narrow column holds no more."""
    value = float(value)
    if metric != "mse" or 0.01 <= value < 100:
        return f"{value:.2f}"
    return error_number(value, 2) if value == 0 or value >= 100 else _trimmed(f"{value:.0e}")


def _worst(row: Row) -> str:
    worst = row["worst"]
    if not worst:
        return "-"
    metric = worst["metric"]
    unit = "" if metric == "ssim" else f"{TITLES[metric]} "
    return f"{unit}{interval(worst[metric], metric)} {worst['attack']}"


def short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def idle(rows: Sequence[Row]) -> set[str]:
    """Attacks that apply to no row: their columns are left to the files."""
    names = {n for r in rows for n in r["attacks"]}
    found = {n: {r["attacks"][n]["status"] for r in rows if n in r["attacks"]} for n in names}
    return {n for n, statuses in found.items() if statuses == {"not_applicable"}}


def brief_number(value: Any) -> str:
    return f"{value:.3g}".replace("e+0", "e") if isinstance(value, float) else short(value)


def markdown(rows: Sequence[Row], run: dict[str, Any]) -> str:
    """One section per table, and how the numbers were made."""
    suite = run["suite"]
    legends = [LEGEND, *([ERROR_LEGEND] if any_errors(rows) else []), AUDIT_LEGEND]
    legends += [PERSONAL_LEGEND] if any_personalised(rows) else []
    lines = [
        f"# {suite['name']} v{suite['version']}",
        "",
        suite["description"],
        "",
        f"Command: `{run['command']}`  ",
        f"Device: {run['device']}, seeds {seeds_of(run)}  ",
        "Versions: " + ", ".join(f"{k} {v}" for k, v in run["versions"].items()),
        "",
        " ".join(legends),
        "",
    ]
    for title, members in tables(rows):
        header, body = cells(members)
        lines += [f"## {title}", "", f"Threat: {members[0]['threat']}", ""]
        lines += ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
        lines += [
            "| " + " | ".join(_one_line(c).replace("|", "\\|") for c in line) + " |"
            for line in body
        ]
        reasons = _reasons(members)
        lines += ["", *reasons, ""] if reasons else [""]
    return "\n".join(lines).rstrip() + "\n"


def _one_line(text: str) -> str:
    """Errors may have several lines, which would end a table's row or a list's entry."""
    return " ".join(text.splitlines())


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Why a cell has no figure, once per attack and reason."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, entry in row["attacks"].items():
            if entry["status"] != "done":
                found.setdefault(
                    f"{name} {entry['status'].replace('_', ' ')}: {entry['reason']}", []
                ).append(setting(row))
    return [f"- {_one_line(reason)} ({', '.join(which)})" for reason, which in found.items()]


def to_csv(rows: Sequence[Row]) -> str:
    """One line per row and attack, every figure with its interval and floor."""
    keys = ("suite", "protocol", "dataset", "model", "defense", "variant", "checkpoint", "rank")
    costs = (
        "eps_claimed",
        "unit",
        "eps_record",
        "delta",
        "bytes_up",
        "bytes_down",
        "client_seconds",
    )
    header = [*keys, "settings", "seeds", "threat", "accuracy", "accuracy_lo", "accuracy_hi"]
    header += ["personal_accuracy", "personal_accuracy_lo", "personal_accuracy_hi"]
    audit = ("eps_audited", "eps_at_least", "verdict_claim", "verdict_proof")
    header += [*costs, *audit, "attack", "status", "reason", "n", "failed"]
    for metric in METRICS:
        header += [metric, f"{metric}_lo", f"{metric}_hi", f"{metric}_floor"]
    header += ["seconds", "gradient_evaluations", "gain_at_twice_budget", "flags"]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        base = [row[k] for k in keys]
        base += [setting(row), " ".join(map(str, row["seeds"])), row["threat"]]
        base += _three(row["accuracy"]) + _three(row["personal_accuracy"])
        base += [row[c] for c in costs]
        base += [(row.get("audit") or {}).get(a) for a in audit]
        for name, entry in row["attacks"].items() or [("", None)]:
            line = [*base, name]
            if entry is not None:
                line += [entry[k] for k in ("status", "reason", "n", "failed")]
                for metric in METRICS:
                    line += [*_three(entry[metric]), entry["floor"].get(metric)]
                line += [entry["seconds"], entry["gradient_evaluations"]]
                line.append((entry.get("convergence") or {}).get("gain"))
            else:
                line += [None] * (len(header) - len(line) - 1)
            writer.writerow([*line, "; ".join(row["flags"])])
    return buffer.getvalue()


def _three(value: dict[str, float] | None) -> list[float | None]:
    return [value["mean"], value["lo"], value["hi"]] if value else [None, None, None]


def to_leaderboard_json(rows: Sequence[Row]) -> str:
    """Strict JSON, a row per line: thousands of rows are written many times as fast as indented."""
    lines = ",\n".join(to_line(row) for row in rows)
    return f"[\n{lines}\n]\n"
