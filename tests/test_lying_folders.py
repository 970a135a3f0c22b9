"""Folders whose records were changed by somebody who wants to look better: what contradicts their
run is refused in one sentence, and what nobody can refute is called unverified."""

import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import bench
from bench.errors import UserError
from bench.records.files import ARCHIVE
from bench.report.files import Files
from tests.small_folders import SUITE, call, go, said
from tests.test_merge import edit

TWO = SUITE.replace("victims = 2", "victims = 3").replace(
    'defenses = [{ name = "none" }]',
    'seeds = [0, 1]\ndefenses = [{ name = "none" }, { name = "gaussian", settings = '
    "{ noise_multiplier = 0.1, clip_norm = 1.0 } }]",
)  # fmt: skip
Record = dict[str, Any]
Lie = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its published folder, both without a lie."""
    place = tmp_path_factory.mktemp("sound")
    result = go(place / "made", TWO)
    assert result.exit_code == 0, result.output
    assert call("report", place / "made", "--publish", place / "published").exit_code == 0
    return place


# --- how to lie ---------------------------------------------------------------------------------


def told(change: Callable[[Record], None], kind: str = "attack", **only: Any) -> Lie:
    """Change all records of a kind, or those that are of a seed, defense or attack."""

    def lie(folder: Path) -> None:
        for path, record, about in listed(folder, kind):
            if all(about[k] == v for k, v in only.items()):
                change(record)
                path.write_text(json.dumps(record))

    return lie


def listed(folder: Path, kind: str) -> Iterator[tuple[Path, Record, dict[str, Any]]]:
    """Path and content of each record, and what run.json says that it is."""
    for training in json.loads((folder / "run.json").read_text())["trainings"]:
        about = {"seed": training["seed"], "defense": training["defense"], "attack": ""}
        keys = {training["key"]: about}
        if kind == "attack":
            keys = {c["key"]: {**about, "attack": c["attack"]} for c in training["cells"]}
        for key, one in keys.items():
            path = folder / "records" / kind / f"{key}.json"
            yield path, json.loads(path.read_text()), one


def setting(*keys: str | int, to: Any) -> Callable[[Record], None]:
    """Give a value inside of a record another one, or what `to` makes of it."""

    def change(record: Record) -> None:
        place: Any = record
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to(place[keys[-1]]) if callable(to) else to

    return change


def per_victim(
    make: Callable[[list[float]], list[float]], victims: int
) -> Callable[[Record], None]:
    """Change every list of one figure per victim."""

    def change(record: Record) -> None:
        record["victims"] = victims
        for scores in (record["values"], record["floors"], (record["doubled"] or {}).get("values")):
            scores and scores.update({k: make(v) for k, v in scores.items()})
        record["judged"] = record["judged"] and make(record["judged"])

    return change


def copied(*kept: str, kinds: tuple[str, ...] = ("train", "attack"), of_seed: bool = True) -> Lie:
    """Give the records of seed 1, or else of the defense, the content of seed 0's, or of no
    defense, but for some keys."""

    def lie(folder: Path) -> None:
        for kind in kinds:
            entries = list(listed(folder, kind))
            for path, record, about in entries:
                if (about["seed"] == 1) if of_seed else (about["defense"] != "none"):
                    other = {"seed": 0} if of_seed else {"defense": "none"}
                    wanted = about | other
                    (source,) = (r for _, r, a in entries if a == wanted)
                    path.write_text(
                        json.dumps(source | {k: record[k] for k in kept if k in record})
                    )

    return lie


def without_hashes(folder: Path) -> None:
    copied("key", "inputs", "train")(folder)
    told(setting("hashes", to={}), "train")(folder)


def swapped_attacks(folder: Path) -> None:
    entries = {tuple(a.values()): (p, r) for p, r, a in listed(folder, "attack")}
    one, two = entries[0, "none", "ilrg"], entries[0, "none", "dlg"]
    one[0].write_text(json.dumps(two[1] | {"key": one[1]["key"]}))


def other_settings(record_too: bool) -> Lie:
    """Claim more noise than there was."""

    def lie(folder: Path) -> None:
        run = json.loads((folder / "run.json").read_text())
        entry = next(d for d in run["suite"]["defenses"] if d["name"] == "gaussian")
        entry["settings"]["noise_multiplier"] = 100.0
        for training in run["trainings"]:
            if training["defense"] == "gaussian":
                training["settings"]["noise_multiplier"] = 100.0
        (folder / "run.json").write_text(json.dumps(run))
        if record_too:
            change = setting("inputs", "settings", "noise_multiplier", to=100.0)
            told(change, "train", defense="gaussian")(folder)

    return lie


def rewritten(name: str, change: Callable[[dict[str, Any]], Any]) -> Lie:
    """Change the tensors of all artifacts of a name."""

    def lie(folder: Path) -> None:
        for path in folder.glob(f"artifacts/*/*{name}"):
            tensors = load_file(path)
            change(tensors)
            save_file(tensors, path)

    return lie


def better_pictures(tensors: dict[str, Any]) -> None:
    tensors["images"] = tensors["images"] * 0


THREE = [0.4, 0.3, 0.2]
NOISY = {"defense": "gaussian"}
DLG = {"attack": "dlg"}
REFUSED: dict[str, tuple[Lie, str]] = {
    "seed 0 again as seed 1": (copied(), "it is record"),
    "seed 0 again, keys to match": (copied("key", "train"), "its inputs are not those of its job"),
    "seed 0 again, inputs to match": (
        copied("key", "train", "inputs"), "two seeds have the same private samples"),
    "seed 0 again, without hashes": (without_hashes, "so one is a copy of the other"),
    "1000 copies of a victim": (
        told(per_victim(lambda v: v[:1] * 1000, 1000)), "it has 1000 victims of 1 samples"),
    "victims left out": (told(per_victim(lambda v: v[:1], 1)), "it has 1 victims"),
    "a victim in another's place": (
        told(per_victim(lambda v: v[:1] * 3, 3), **DLG), "baselines on one observation differ"),
    "another defense's records": (copied(of_seed=False), "it is record"),
    "another defense's, keys to match": (
        copied("key", "train", of_seed=False), "its inputs are not those"),
    "another attack's record": (swapped_attacks, "its inputs are not those"),
    "another checkpoint": (
        told(setting("inputs", "checkpoint", to="final"), **DLG), "its inputs are not those"),
    "another threat": (told(setting("inputs", "threat", to="x"), **DLG), "its inputs are not"),
    "another training": (told(setting("train", to="0" * 24), **DLG), "its training is 000000"),
    "settings in run.json": (other_settings(False), "its inputs are not those of its job"),
    "an SSIM of 5": (
        told(setting("values", "ssim", to=[5.0, 0.1, 0.1]), **DLG, seed=0, defense="none"),
        "has ssim [5.0]"),
    "an SSIM of -2": (told(setting("values", "ssim", 0, to=-2.0), **DLG), "has ssim [-2.0]"),
    "an error below 0": (told(setting("values", "mse", 0, to=-0.1), **DLG), "has mse [-0.1]"),
    "no number": (told(setting("values", "ssim", 0, to="nan"), **DLG), "has ssim [nan]"),
    "a PSNR of 300": (told(setting("values", "psnr", 0, to=300.0), **DLG), "has psnr [300.0]"),
    "a label count of 3": (
        told(setting("values", "lnacc", 0, to=3.0), attack="ilrg"), "has lnacc [3.0]"),
    "an unknown metric": (told(setting("values", "safety", to=THREE), **DLG), "no baseline of"),
    "a raised baseline": (
        told(setting("floors", "ssim", to=THREE), **DLG), "ssim baselines on one observation"),
    "raised baselines of a defense": (
        told(lambda r: "ssim" in r["floors"] and r["floors"].update(ssim=THREE), **NOISY),
        "ssim baselines on one observation differ"),
    "more right answers than samples": (
        told(setting("correct", to=10**6), "train", **NOISY), "cannot be"),
    "another test set": (
        told(setting("test_samples", to=lambda n: 2 * n), "train", **NOISY), "test sets differ"),
    "another chance": (
        told(setting("class_chance", to=0.01), "train", **NOISY), "test sets differ"),
    "better personal accuracies": (
        told(setting("personal_accuracy", to=1.0), "train"), "accuracies have the mean"),
    "fewer rounds in the ledger": (
        told(setting("facts", "batch", to=1), "train", **NOISY), "its ledger counts batch 1"),
    "another delta": (told(setting("ledger", "delta", to=0.5), "train"), "is for delta 0.5"),
    "negative bytes": (told(setting("bytes_up", to=-5.0), "train"), "bytes_up is -5.0"),
    "negative seconds": (told(setting("seconds", to=-1.0), **DLG), "it took -1.0 seconds"),
    "a smaller budget": (told(setting("budget", to=1), **DLG), "its budget is 1"),
    "a doubled run at no budget": (
        told(setting("doubled", "budget", to=5), defense="none", **DLG), "its doubled budget is 5"),
    "a doubled run of an attack that reads nothing": (
        told(setting("is_floor", to=True), **DLG), "it reads no message, and has a doubled run"),
    "an attack that reads nothing": (
        told(setting("is_floor", to=True), **DLG, **NOISY), "only one of them reads messages"),
    "more failures than victims": (told(setting("failed", to=7), **DLG), "7 of 3 victims failed"),
    "another device": (told(setting("device", to="cuda"), **DLG), "it ran on cuda, not on cpu"),
    "another key": (told(setting("key", to="0" * 24), **DLG), "it is record 000"),
    "views": (told(setting("views", to=[1, 2]), **DLG), "it has 2 views of 0"),
    "a training that failed": (
        told(lambda r: r.update(status="failed", reason="x"), "train", **NOISY),
        "it is done, and its training is failed"),
    "a round that was not observed": (
        told(setting("observations", "init", "server",
                     to={"status": "not_applicable", "reason": "x", "stem": ""}), "train"),
        "its training was not observed then"),
    "an audit that nobody asked for": (
        told(setting("audit", to={
            "draws": 9, "confidence": 0.9, "eps_audited": 0.0, "eps_at_least": False,
            "verdict_claim": "consistent", "verdict_proof": "consistent",
        }), "train"), "its audit has 9 draws"),
}  # fmt: skip
"""What a report refuses, with words of the sentence."""


def several(folder: Path) -> None:
    """A smaller epsilon, and an attack that reads nothing."""
    told(setting("ledger", "eps_record", to=0.1), "train")(folder)
    told(setting("is_floor", to=True), attack="ilrg")(folder)


VERIFY_TELLS: dict[str, tuple[Lie, str]] = {
    "several in records": (several, r"ledger.eps_record\b.* is_floor\b"),
    "settings, in run.json and records": (other_settings(True), "ledger.eps_record"),
    "other pictures": (rewritten("reconstruction.safetensors", better_pictures), "was changed"),
    "another truth": (
        rewritten("-truth.safetensors", lambda t: t.update(x=t["x"] * 0)), "was changed"),
}  # fmt: skip
"""What no reader of records can refute, and a pattern of how verify tells it."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_lie_that_contradicts_the_run_is_refused_in_a_sentence(
    sound: Path, tmp_path: Path, name: str
) -> None:
    lie, words = REFUSED[name]
    folder = Path(shutil.copytree(sound / "made", tmp_path / "made"))
    lie(folder)
    result = call("report", folder)
    assert result.exit_code == 2, result.output
    assert words in said(result)


def test_every_reader_of_a_folder_refuses_and_a_run_makes_the_record_anew(
    sound: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sound / "made", tmp_path / "made"))
    lie, words = REFUSED["an SSIM of 5"]
    lie(folder)
    for command in (
        ("report", folder), ("compare", folder, "none", "gaussian"), ("site", tmp_path, "--out",
        tmp_path / "../site"), ("merge", folder, "--out", tmp_path / "../merged"),
        ("verify", folder), ("report", folder, "--publish", tmp_path / "../out"),
        ("score", folder, "none/dlg/init", folder / "answer.npz"),
    ):  # fmt: skip
        result = call(*command)
        assert result.exit_code in (1, 2), command
        assert words in said(result) or command[0] == "score", (command, result.output)
    for read in (lambda r: r.rows, lambda r: r.victims(), lambda r: r.failures):
        with pytest.raises(UserError, match="has ssim"):
            read(bench.load(folder))
    result = go(folder, TWO)
    assert result.exit_code == 0, result.output
    assert call("report", folder).exit_code == 0


@pytest.mark.parametrize("name", VERIFY_TELLS)
def test_what_reading_cannot_refute_is_unverified_and_verify_finds_it(
    sound: Path, tmp_path: Path, name: str
) -> None:
    lie, words = VERIFY_TELLS[name]
    folder = Path(shutil.copytree(sound / "made", tmp_path / "made"))
    lie(folder)
    result = call("report", folder)
    assert result.exit_code == 0, result.output
    assert "Unverified: nobody made these figures again" in said(result)
    result = call("verify", folder, "--jobs", "0", "--device", "cpu", "--sandbox", "none", "--only",
                  "attack=ilrg", "--sample", "1")  # fmt: skip
    assert result.exit_code == 1, result.output
    assert re.search(words, said(result)), result.output


def test_a_folder_is_verified_by_a_rerun_until_a_file_of_it_changes(
    sound: Path, tmp_path: Path
) -> None:
    for name in ("made", "published"):
        folder = Path(shutil.copytree(sound / name, tmp_path / name))
        assert "unverified" in repr(bench.load(folder))
        result = call("verify", folder, "--jobs", "0", "--device", "cpu", "--sandbox", "none",
                      "--sample", "1", "--json")  # fmt: skip
        assert result.exit_code == 0, result.output
        document, _ = json.JSONDecoder().raw_decode(result.output[result.output.index("{") :])
        (tmp_path / f"{name}.verified.json").write_text(json.dumps(document))
        assert "Verified on" in said(call("report", folder))
        assert ", verified" in repr(bench.load(folder))
        if name == "made":
            told(setting("values", "ssim", to=THREE), **DLG)(folder)
        else:
            text = gzip.decompress((folder / ARCHIVE).read_bytes())
            changed = re.sub(rb'"seconds": [0-9.]+', b'"seconds": 1', text)
            (folder / ARCHIVE).write_bytes(gzip.compress(changed))
        assert "Unverified" in said(call("report", folder))


# --- published folders --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [*lines, lines[-1]], "twice"),
        (
            lambda lines: [line.replace(b'"ssim": [0.', b'"ssim": [7.') for line in lines],
            "has ssim",
        ),
        (lambda lines: lines[:-1], "which is missing"),
    ],
    ids=["a record twice", "an SSIM of 7", "a record left out"],
)
def test_records_in_one_file_are_held_against_the_run_too(
    sound: Path, tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], words: str
) -> None:
    folder = Path(shutil.copytree(sound / "published", tmp_path / "published"))
    lines = gzip.decompress((folder / ARCHIVE).read_bytes()).splitlines()
    (folder / ARCHIVE).write_bytes(gzip.compress(b"\n".join(change(lines))))
    result = call("verify", folder)
    assert result.exit_code in (1, 2)
    assert words in said(result)


def test_baselines_of_two_processors_may_differ_by_rounding(sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound / "made", tmp_path / "made"))
    told(setting("floors", "psnr", to=lambda v: [x + 1e-6 for x in v]), **DLG)(folder)
    assert Files(folder).rows


def test_records_that_belong_to_nothing_change_no_figure(sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound / "made", tmp_path / "made"))
    path, record, _ = next(listed(folder, "attack"))
    record["values"]["ssim"] = [5.0] * 3
    path.with_name(f"{'1' * 24}.json").write_text(json.dumps(record | {"key": "1" * 24}))
    assert Files(folder).rows == Files(sound / "made").rows


# --- suites -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_suite_that_takes_a_shipped_ones_name_and_version_is_said_to_be_another(
    sound: Path, tmp_path: Path
) -> None:
    from bench.suite import read_suite

    folder = Path(shutil.copytree(sound / "made", tmp_path / "results" / "made"))
    version = read_suite("quick").version
    edit(folder, lambda r: r["suite"].update(name="quick", version=version))
    title = f"quick v{version} (changed: "
    assert Files(folder).text("md").startswith(f"# {title}")
    assert title in Files(folder).text("html")
    assert title in repr(bench.load(folder))
    assert title in said(call("verify", folder))
    assert call("site", folder.parent, "--out", tmp_path / "site").exit_code == 0
    assert f"v{version} (changed: " in (tmp_path / "site" / "index.html").read_text()
    edit(folder, lambda r: r["suite"].update(version=version + 1))
    assert "(changed" not in Files(folder).text("md")
