"""Notes: what others reported of such cards and models, from doctor/data/notes.toml."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.doctor.estimate import tensor_sizes
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.doctor.known import Note, read_notes
from metainfer.hardware.machine import gpus_of


def notes(patient: Patient) -> Iterator[Finding]:
    for note in read_notes():
        if counts(note, patient):
            yield Finding(
                note.check,
                Level(note.level),
                note.what,
                note.evidence,
                note.matters,
                note.fix,
                note.source,
            )


def counts(note: Note, patient: Patient) -> bool:
    """Whether a note is about such a machine with such a model."""
    if not note.cards.among(patient.machine):
        return False
    shape = patient.shape
    if shape is None:
        return not note.families
    if note.families and shape.side.family not in note.families:
        return False
    sizes = tensor_sizes(shape, len(gpus_of(patient.machine)))
    return not note.heads or any(shape.side.heads // size in note.heads for size in sizes)


CHECKS = (Check("reports", "What did others find on such cards with such a model?", notes),)
