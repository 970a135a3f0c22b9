"""What flags and columns mean, in words that stand beside them on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.records import Flag, FlagCode, Row

COLUMNS = {
    "rank": "Rank by the attacker's choice, or by the upper bound where there is none, the least "
    "leak first. Rows that a paired test over victims and seeds does not separate at 5 % share a "
    "rank. Rows whose training diverged or whose accuracy is at chance have none: nobody would "
    "deploy them. Where the undefended row leaks less than .2, no row has one.",
    "accuracy": "Test accuracy of the common model, with its 95 % interval. No figure where some "
    "value of the network is never uploaded, so that there is no common model.",
    "lost": "Points of accuracy below the undefended row of the table, mean over seeds; of the "
    "clients' own networks where there is no common model.",
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
    "floor": "What needs no leak. The first figure is what the best answer scores that looks at "
    "nothing, the second the best one that is told the labels. An attack between the two leaked "
    "labels, not images.",
    "choice": "Per victim the answer that an attacker chooses of all attacks' answers: the one of "
    "least loss under one judge, which knows no truth. Mean over victims with its 95 % interval. "
    "Named is the attack that is chosen for most victims.",
    "leak": "How far the attacker's choice (without one, the upper bound) comes from its floor to "
    "a perfect copy: (score - floor) / (1 - floor) of SSIM, (floor - error) / floor of errors. "
    "0: nothing, 1: everything.",
    "bound": "Upper bound: per victim the attack that rebuilds it best, which only the truth "
    "tells, then the mean over victims, with its 95 % interval. No attacker could choose so well. "
    "Named is the attack that is best for most victims.",
    "flags": "What to know before trusting the row. Press one for its full sentence.",
}
"""By the `note` of a column."""


@dataclass(frozen=True)
class Meaning:
    """What a kind of flag says.

    Attributes:
        chip: A few words; {subject} stands for the attack or unit that the flag is about.
        text: The whole sentence, with the flag's values.
        why: What it means for a reader.
        letter: Key of LETTERS, "" where the terminal leaves it to the files.
    """

    chip: str
    text: str
    why: str
    letter: str = ""


LETTERS = {
    "D": "training diverged",
    "C": "accuracy at chance",
    "O": "messages are not as the defense declares",
    "N": "attacks do not work here without a defense: nothing is ranked",
    "U": "ranked by the upper bound, for want of judged losses",
    "B": "an attack was cut short: undefended, twice its budget leaks more",
    "F": "strongest attack below its floor: too weak to judge by",
    "J": "one attack leaks much more than the answers that were chosen",
    "R": "the first round alone leaks much more than the rounds together",
    "W": "the clients' images are rebuilt, but not whose each is",
    "M": "not the paper's own method, as the report says",
    "V": "the audit refutes a claim or proof",
    "X": "something failed",
    "T": "over the time limit",
    "P": "an attack has not run yet",
}
"""At a row's end in the terminal."""
FLAGS: Mapping[FlagCode, Meaning] = {
    FlagCode.TRAINING_FAILED: Meaning(
        "training failed",
        "training failed: {reason}",
        "There is no trained model, so no figure.",
        letter="X",
    ),
    FlagCode.TRAINING_TIMEOUT: Meaning(
        "training timed out",
        "training timeout: {reason}",
        "There is no trained model, so no figure.",
        letter="T",
    ),
    FlagCode.TRAINING_NOT_APPLICABLE: Meaning(
        "not applicable", "training not_applicable: {reason}", "The defense cannot run here."
    ),
    FlagCode.DIVERGED: Meaning(
        "diverged",
        "diverged: {reason}",
        "The weights exploded or are not finite: a result, not an error. The row has no rank,"
        " and its last round was not attacked.",
        letter="D",
    ),
    FlagCode.UNDECLARED: Meaning(
        "not as declared",
        "messages are not as declared: {reason}",
        "What clients sent is not what the defense tells attackers that it does, so they attacked "
        "something else. The row has no rank.",
        letter="O",
    ),
    FlagCode.AT_CHANCE: Meaning(
        "accuracy at chance",
        "accuracy at chance",
        "The model is no better than guessing the commonest class, so its leak is beside the "
        "point. The row has no rank.",
        letter="C",
    ),
    FlagCode.CLAIMED_NOT_PROVEN: Meaning(
        "ε not proven",
        "epsilon claimed, none proven",
        "The paper claims an epsilon, but nothing follows from it for a training record, "
        "since something leaves the client unprotected.",
    ),
    FlagCode.CLAIM_UNIT: Meaning(
        "claim per {subject}",
        "claim is per {subject}",
        "The claimed epsilon protects that unit, which is not one training record; do not "
        "compare it with claims of another unit.",
    ),
    FlagCode.AUDIT_REFUTES_CLAIM: Meaning(
        "audit refutes claim",
        "audit refutes the claim: epsilon is at least {epsilon:.2f}",
        "An attack on a single release tells two inputs apart better than the claimed epsilon"
        " allows.",
        letter="V",
    ),
    FlagCode.AUDIT_REFUTES_PROOF: Meaning(
        "audit refutes proof",
        "audit refutes the proof: epsilon is at least {epsilon:.2f}",
        "An attack on a single release tells two inputs apart better than the proof allows: a"
        " mistake in leakbench or in the defense's code.",
        letter="V",
    ),
    FlagCode.AUDIT_FAILED: Meaning(
        "audit failed",
        "audit failed: {reason}",
        "The audit did not finish, so it says nothing.",
        letter="X",
    ),
    FlagCode.CUT_SHORT: Meaning(
        "{subject} cut short",
        "{subject} cut short: {gain:+.2f} SSIM on the undefended row at twice its budget",
        "With twice its budget this attack rebuilds more where nothing defends. It had not "
        "converged, so the row may understate the leak.",
        letter="B",
    ),
    FlagCode.BELOW_FLOOR: Meaning(
        "below the floor",
        "strongest attack ({subject}) below the floor",
        "The strongest attack rebuilds less than the best answer that looks at nothing: too "
        "weak to judge the defense by.",
        letter="F",
    ),
    FlagCode.WHOSE_UNKNOWN: Meaning(
        "{subject}: whose is unknown",
        "{subject} rebuilds the clients' images to an SSIM of {ssim:.2f}, but not whose each is",
        "A sum over the clients shows their images, and what each sent by itself does not tell "
        "which is whose. Scores compare an answer with its own client's image, so the row "
        "understates the leak.",
        letter="W",
    ),
    FlagCode.UNDERSTATED: Meaning(
        "{subject} leaks more",
        "{subject} alone leaks {leak:.2f}, but worse answers were chosen",
        "Of the attacks' answers those that explain best what was seen are much worse than what one"
        " attack rebuilds of all victims: whoever trusts that attack gets more than the row"
        " shows.",
        letter="J",
    ),
    FlagCode.FIRST_ROUND: Meaning(
        "first round leaks more",
        "the first round alone leaks {leak:.2f} ({subject}), though it is one of those seen",
        "Who sees several rounds can always look at the first alone, which was attacked in a row of"
        " its own: the attacks get less from all of them together, or its victims are easier ones,"
        " so the row may understate the leak.",
        letter="R",
    ),
    FlagCode.ATTACK_FAILED: Meaning(
        "{subject} failed",
        "{subject} failed",
        "The attack stopped with an error: its victims are missing from the row.",
        letter="X",
    ),
    FlagCode.ATTACK_TIMEOUT: Meaning(
        "{subject} timed out",
        "{subject} timeout",
        "The attack ran into the time limit: its victims are missing from the row.",
        letter="T",
    ),
    FlagCode.ATTACK_PENDING: Meaning(
        "{subject} pending",
        "{subject} has not run yet",
        "The run was stopped before this attack: the row may leak more. Run the same command to go"
        " on.",
        letter="P",
    ),
    FlagCode.BY_BOUND: Meaning(
        "by upper bound",
        "ranked by the upper bound: its records have no judged losses",
        "What an attacker would choose among the attacks' answers is not known, so the best by the"
        " truth ranks the row: the attacker may do worse.",
        letter="U",
    ),
    FlagCode.NOT_AS_PUBLISHED: Meaning(
        "not the paper's method",
        "not the paper's own method: {reason}",
        "The row was published before this was found, and stays as it was measured. Do not cite it"
        " for the paper's method.",
        letter="M",
    ),
    FlagCode.CONTROL_FAILED: Meaning(
        "control failed",
        "attacks do not work here without a defense (leak {leak:.2f}): nothing is ranked",
        "The undefended row of this table leaks less than .2 of the way from its floor to a perfect"
        " copy, so a small leak says nothing about a defense.",
        letter="N",
    ),
    FlagCode.OTHER: Meaning("{text}", "{text}", ""),
}
"""By code."""
_CHIP = 40
"""Most characters of a chip."""


def sentence(flag: Flag) -> str:
    """The whole flag in words."""
    return _filled(FLAGS[flag.code].text, flag)


def chip(flag: Flag) -> str:
    """The flag in a few words."""
    text = _filled(FLAGS[flag.code].chip, flag)
    return text if len(text) <= _CHIP else f"{text[: _CHIP - 1]}…"


def letters(flags: Sequence[Flag]) -> str:
    """The letters of a row's flags, each once, in the order of LETTERS."""
    found = {FLAGS[f.code].letter for f in flags}
    return "".join(letter for letter in LETTERS if letter in found)


def _filled(template: str, flag: Flag) -> str:
    try:
        return template.format(**{**flag.values, "subject": flag.subject})
    except (KeyError, ValueError):  # a file from elsewhere may lack a value
        return " ".join([flag.code.replace("_", " "), flag.subject]).strip()


def interval_words(rows: Sequence[Row]) -> str:
    """What the rows' intervals are over."""
    return " or ".join(dict.fromkeys(f"95 % interval over {r.interval_over}" for r in rows))
