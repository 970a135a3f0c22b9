"""What flags and columns mean, in words that stand beside them on the page."""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = {
    "rank": "Rank by the worst case over attacks, the least leak first. Rows whose training "
    "diverged or whose accuracy is at chance have no rank: nobody would deploy them.",
    "accuracy": "Test accuracy of the common model, with its 95 % interval. No figure where some "
    "value of the network is never uploaded, so that there is no common model.",
    "own": "Accuracy of each client's own network on test samples in its own label shares, mean "
    "over clients.",
    "claimed": "Epsilon by the paper's own formula, and what it is for: one coordinate, label, "
    "record or client. Claims of different units cannot be compared. ! marks a claim that the "
    "audit refutes.",
    "proven": "Epsilon that is proven for one training record over the whole run. inf: nothing is "
    "proven.",
    "audited": "What an attack on a single release, through the defense's own code, certifies: "
    "the true epsilon is at least this. + marks bounds that only more draws could raise, ! bounds "
    "above what is claimed or proven.",
    "ssim": "Structural similarity of rebuilt and private images, mean over victims with its 95 % "
    "interval. 1 is a perfect copy; lower is safer. Compare it with the floor.",
    "mse": "Mean squared error of the rebuilt records on standardised features, with its 95 % "
    "interval. 0 is a perfect copy; higher is safer. Compare it with the floor.",
    "lnacc": "Share of classes whose number of samples in the batch was read off exactly, with its "
    "95 % interval. Lower is safer. Compare it with the floor.",
    "floor": "What needs no leak. The first figure is what the mean public image (or record) "
    "scores, the second what the mean public image of the true class scores; for labels, a guess "
    "by public class frequencies. An attack between the two leaked labels, not images.",
    "worst": "Per victim the attack that rebuilds it best, then the mean over victims, with its "
    "95 % interval. Named is the attack that is worst for most victims.",
    "flags": "What to know before trusting the row. Press one for its full sentence.",
}
"""By the `note` of a column."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """chip: a few words; text: the whole flag; why: what it means for a reader."""

    chip: str
    text: str
    why: str
    level: str = "info"


_KNOWN = (
    # what the flag contains, chip ({} is the flag's first word), level, meaning
    ("training failed", "training failed", "bad", "There is no trained model, so no figure."),
    ("training timeout", "training timed out", "bad", "There is no trained model, so no figure."),
    ("training not_applicable", "not applicable", "info", "The defense cannot run here."),
    (
        "diverged:",
        "diverged",
        "bad",
        "The weights exploded or are not finite: a result, not an "
        "error. The row has no rank, and its last round was not attacked.",
    ),
    (
        "accuracy at chance",
        "accuracy at chance",
        "bad",
        "The model is no better than guessing the "
        "commonest class, so its leak is beside the point. The row has no rank.",
    ),
    (
        "epsilon claimed, none proven",
        "ε not proven",
        "warn",
        "The paper claims an epsilon, but "
        "nothing follows from it for a training record, since something leaves the client "
        "unprotected.",
    ),
    (
        "claim is per ",
        "{}",
        "info",
        "The claimed epsilon protects that unit, which is not one "
        "training record; do not compare it with claims of another unit.",
    ),
    (
        "audit refutes the claim",
        "audit refutes claim",
        "bad",
        "An attack on a single release "
        "tells two inputs apart better than the claimed epsilon allows.",
    ),
    (
        "audit refutes the proof",
        "audit refutes proof",
        "bad",
        "An attack on a single release "
        "tells two inputs apart better than the proof allows: a mistake in leakbench or in the "
        "defense's code.",
    ),
    ("audit failed", "audit failed", "warn", "The audit did not finish, so it says nothing."),
    (
        " cut short: ",
        "{} cut short",
        "warn",
        "With twice its budget this attack rebuilds more "
        "where nothing defends. It had not converged, so the row may understate the leak.",
    ),
    (
        " below the floor",
        "below the floor",
        "warn",
        "The strongest attack rebuilds less than the "
        "mean public sample: too weak to judge the defense by.",
    ),
    (
        " timeout",
        "{} timed out",
        "bad",
        "The attack ran into the time limit: its victims are missing from the row.",
    ),
    (
        " failed",
        "{} failed",
        "bad",
        "The attack stopped with an error: its victims are missing from the row.",
    ),
)


def flag(text: str) -> Flag:
    """A flag of a row, shortened and explained; unknown ones stand for themselves."""
    for needle, chip, level, why in _KNOWN:
        if needle in text:
            if needle == "claim is per ":
                chip = f"claim per {text.removeprefix(needle)}"
            return Flag(chip=chip.format(text.split(" ")[0]), text=text, why=why, level=level)
    return Flag(chip=text if len(text) <= 40 else text[:39] + "…", text=text, why="")
