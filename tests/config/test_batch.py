"""The size of each step, and which samples are left out: equal to counting one by one.

tests/data/test_data_outsiders.py has the ramp of Megatron-core.
"""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from layouts import config
from minitron.config.batch import batch_size, batch_stages, consumed_of, final, trained_after, trained_of
from minitron.config.schema import Config, TrainConfig

RAMPS = st.builds(
    lambda start, increment, count, samples: TrainConfig(
        global_batch_size=start + increment * count, batch_ramp=(start, increment, samples)
    ),
    *(st.integers(1, 40), st.integers(1, 40), st.integers(1, 30), st.integers(1, 5000)),
)
SCHEDULES = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 60)), min_size=1, max_size=6).map(
    lambda parts: TrainConfig(
        global_batch_size=parts[-1][1],
        batch_schedule=tuple((sum(length for length, _ in parts[:i]), size) for i, (_, size) in enumerate(parts)),
    )
)


def sizes(t: TrainConfig):
    """The samples trained before each step, and its size."""
    trained = 0
    while True:
        yield trained, batch_size(t, trained)
        trained += batch_size(t, trained)


@given(SCHEDULES)
def test_a_schedule_s_last_threshold_that_is_passed_counts(t):
    """As of Megatron-LM's StepBatchsizeNumMicroBatchesCalculator, with tokens divided by the sequence length."""
    for trained, size in islice(sizes(t), 60):
        passed = [entry for entry in t.batch_schedule if entry[0] <= trained]
        assert size == max(passed)[1]


def test_a_ramp_is_the_schedule_of_its_docstring():
    ramp = TrainConfig(global_batch_size=8, batch_ramp=(2, 2, 12))
    schedule = TrainConfig(global_batch_size=8, batch_schedule=((0, 2), (4, 4), (8, 6), (12, 8)))
    assert list(batch_stages(ramp)) == list(schedule.batch_schedule)
    assert list(islice(sizes(ramp), 6)) == list(islice(sizes(schedule), 6))


@given(RAMPS)
def test_a_ramp_grows_by_one_increment_after_equal_numbers_of_samples(t):
    start, increment, samples = t.batch_ramp
    count = (t.global_batch_size - start) // increment
    for at in {samples * i // count + near for i in range(count + 2) for near in (-1, 0, 1)} - {-1}:
        assert batch_size(t, at) == start + increment * min(count, at * count // samples)


@given(st.one_of(RAMPS, SCHEDULES), st.integers(0, 100), st.integers(0, 40))
def test_samples_after_steps_are_counted_as_one_by_one(t, steps, before):
    begun = [trained for trained, _ in islice(sizes(t), before + steps + 1)]
    assert trained_after(t, steps, begun[before]) == begun[before + steps]


@given(st.sets(st.integers(0, 60), max_size=8).map(sorted))
def test_skipped_samples_are_left_out_of_all(bounds):
    ranges = list(zip(bounds[::2], bounds[1::2]))
    kept = [i for i in range(200) if not any(first <= i < end for first, end in ranges)]
    for n in range(80):
        assert consumed_of(ranges, n) == kept[n]
        assert trained_of(ranges, n) == sum(i < n for i in kept)


def test_the_final_size_of_every_step():
    for sizes in {"batch_ramp": (4, 4, 99)}, {"batch_schedule": ((0, 4), (9, 16))}:
        cfg = config(Config(), {"train": sizes, "data": {"skip_samples": ((0, 4),)}})
        assert final(cfg) == Config()
