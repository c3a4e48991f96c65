"""Tables that travel in part arrive whole, whatever slots do in between."""

from __future__ import annotations

import random

from metainfer.llm.step import SequenceStep, Step, StepKind
from metainfer.llm.step_wire import StepReceiver, StepSender


def step_of(tables: dict[int, tuple[int, ...]]) -> Step:
    parts = [SequenceStep(f"r{slot}", slot, blocks, 0, (1,), 1) for slot, blocks in tables.items()]
    return Step(0, StepKind.DECODE, tuple(parts), len(parts))


def test_any_history_of_slots():
    luck = random.Random(3)
    sender, receiver = StepSender(), StepReceiver()
    tables: dict[int, tuple[int, ...]] = {}
    told = 0
    for _ in range(400):
        slot = luck.randrange(4)
        what = luck.random()
        if what < 0.2:  # another sequence, whose table may begin as the one before
            tables[slot] = (*tables.get(slot, ())[: luck.randrange(3)], luck.randrange(9))
        elif what < 0.5:
            tables[slot] = (*tables.get(slot, ()), luck.randrange(9))
        chosen = {n: tables[n] for n in luck.sample(sorted(tables), luck.randint(0, len(tables)))}
        made = step_of(chosen)
        packed = sender.packed(made)
        told += sum(len(row[3]) for row in packed[2])
        assert receiver.unpacked(packed) == made
    whole = sum(len(blocks) for blocks in tables.values())
    assert told > whole  # of all the sequences that there were


def test_a_table_that_stays_is_not_told_again_and_stays_one_object():
    sender, receiver = StepSender(), StepReceiver()
    blocks = tuple(range(8192))
    first = receiver.unpacked(sender.packed(step_of({2: blocks})))
    packed = sender.packed(step_of({2: blocks}))
    assert packed[2][0][2:4] == (8192, ())
    again = receiver.unpacked(packed)
    assert again.sequences[0].blocks is first.sequences[0].blocks
    grown = receiver.unpacked(sender.packed(step_of({2: (*blocks, 7)})))
    assert grown.sequences[0].blocks == (*blocks, 7)
