"""BatchBuilder: the tensors of a step say what the step says, whatever was built before."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from metainfer.llm.batch import BatchBuilder
from metainfer.llm.step import SequenceStep, Step, StepKind

SLOTS, BLOCKS = 4, 6


@st.composite
def steps(draw) -> Step:
    """A step with up to SLOTS sequences, short ones first."""
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    parts = []
    for slot in slots:
        rows = draw(st.integers(1, 5))
        parts.append(
            SequenceStep(
                request_id=f"r{slot}",
                state_slot=slot,
                blocks=tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=BLOCKS))),
                start=draw(st.integers(0, 50)),
                token_ids=tuple(draw(st.integers(0, 999)) for _ in range(rows)),
                sample_rows=draw(st.integers(0, rows)),
                prompt_logprobs=draw(st.booleans()),
            )
        )
    parts.sort(key=lambda part: len(part.token_ids))
    short = sum(len(part.token_ids) == 1 for part in parts)
    return Step(0, StepKind.MIXED, tuple(parts), short)


@given(st.lists(steps(), min_size=1, max_size=6))
def test_tensors_say_what_the_step_says(made):
    builder = BatchBuilder(SLOTS, BLOCKS, torch.device("cpu"))
    for step in made:
        inputs = builder.build(step)
        assert inputs.num_decode_sequences == step.num_decode_sequences
        assert inputs.num_sequences == len(step.sequences)
        assert inputs.num_decode_rows == step.num_decode_sequences
        assert inputs.state_slots_B.tolist() == [part.state_slot for part in step.sequences]
        assert inputs.row_starts[0] == 0 and inputs.row_starts[-1] == step.num_rows
        logits_rows = []
        wanted = inputs.wanted_rows_W
        wanted_rows = list(range(step.num_rows)) if wanted is None else wanted.tolist()
        for index, part in enumerate(step.sequences):
            first, end = inputs.row_starts[index], inputs.row_starts[index + 1]
            assert inputs.computed[index] == part.start
            assert tuple(inputs.token_ids_T[first:end].tolist()) == part.token_ids
            positions = list(range(part.start, part.start + end - first))
            assert inputs.positions_T[first:end].tolist() == positions
            assert set(inputs.sequence_T[first:end].tolist()) == {index}
            table = inputs.block_table_BM[index].tolist()
            assert tuple(table[: len(part.blocks)]) == part.blocks
            assert set(table[len(part.blocks) :]) <= {-1}
            logits_rows += range(end - part.sample_rows, end)
            decodes = index < step.num_decode_sequences
            count = end - first if decodes or part.prompt_logprobs else part.sample_rows
            assert set(range(end - count, end)) <= set(wanted_rows)
            if wanted is not None:
                own = [row for row in wanted_rows if first <= row < end]
                assert len(own) == inputs.wanted_counts[index]
        assert [wanted_rows[place] for place in inputs.logits_rows_R.tolist()] == logits_rows
        assert wanted_rows and wanted_rows == sorted(set(wanted_rows))
        for tensor in (inputs.token_ids_T, inputs.block_table_BM, inputs.logits_rows_R):
            assert tensor.dtype is torch.int64


def test_tables_of_steps_that_are_still_in_use_do_not_change():
    builder = BatchBuilder(SLOTS, BLOCKS, torch.device("cpu"))

    def built(*blocks: int) -> torch.Tensor:
        part = SequenceStep("r", 0, blocks, 0, (7,), 1)
        return builder.build(Step(0, StepKind.DECODE, (part,), 1)).block_table_BM

    first = built(5, 6)
    assert built(8).tolist() == [[8]]
    assert first.tolist() == [[5, 6]]
