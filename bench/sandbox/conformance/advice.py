"""What to change where a check fails."""

from __future__ import annotations

_ADVICE = {
    "docstring": ("", "Say in a sentence what the plugin does, then what each setting means."),
    "settings": ("__init__", "Write `def __init__(self, *, key: float)`, each with a type."),
    "declarations": ("", "Declare owns, requires or recovers as a frozenset of these names."),
    "bad settings": ("__init__", "Raise ValueError out of range; `not x >= 0` also refuses NaN."),
    "roles": ("", "Add the role to owns, for a+b; together: the clients that a step takes."),
    "strength": ("", "Declare a Strength of one of its settings, or strength = None."),
    "arguments": ("", "Make a new tensor (x + 1, not x += 1); others get the same arguments."),
    "global generators": ("", 'Draw from client.rng["defense"], ctx.rng, or the rng of the hook.'),
    "process": ("", "Put back what you change before you return; other plugins share the process."),
    "no state": ("", "Keep notes in client.memory, a run's state in local variables."),
    "same seed": ("", 'Draw from client.rng["defense"] or ctx.rng; keep nothing between runs.'),
    "other draws": ("", 'Draw from client.rng["defense"], which follows the run\'s seed.'),
    "values that are not": ("", "Set withheld values to 0, and read none (part.presence())."),
    "sealed boxes": ("upload", "Encrypt them: the box travels through the server."),
    "private data": ("", "Send only what was made private; notes belong in client.memory."),
    "zero strength": ("zero_strength", "Find what acts at that strength, or mend the declaration."),
    "composed": ("owns", "Name every role in owns, and change no other defense's messages."),
    "observed": ("public_plans", "Send plain parts of equal kinds in every run; see public_plans."),
    "guarantee": ("guarantee", "Derive both from the same attribute of the defense."),
    "which values": ("guarantee", "Add an Unprotected event for which values are sent, or choose "
    "them without looking at the data."),
    "declared": ("mechanisms", "Declare what is drawn, or draw what is declared, each value anew."),
    "audit": ("guarantee", "Count everything that leaves the client, with its true sensitivity."),
    "runs on": ("run", "Answer as bench.api.Reconstruction says."),
    "runs anywhere": ("applies", "Let applies() return None where the attack can run."),
    "budget": ("run", "Stop each start after ctx.budget evaluations, and report their sum."),
    "it takes samples": ("", "see docs/models.md"),
    "clients' gradients": ("", "replace the operation"),
    "cut in two": ("", "let the submodule's output be all that the layers after it get"),
}  # fmt: skip
"""Hook, "" for the class, and advice by how a check's name begins."""


def advice(check: str) -> tuple[str, str]:
    """The hook that a check is of, and what to change where it fails."""
    return next(entry for name, entry in _ADVICE.items() if check.startswith(name))
