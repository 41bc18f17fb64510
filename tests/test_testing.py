"""Gloo ranks for tests: results, failures, hangs; and the comparison of tensors."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from minitron.kernels.param import Shard
from minitron.testing import Axis, RankPool, assert_close_rel, assert_same_training


def sum_over_ranks(x, scale=1.0):
    y = x * scale * (dist.get_rank() + 1)
    dist.all_reduce(y)
    return {"rank": dist.get_rank(), "world": dist.get_world_size(), "sum": y}


def process_state():
    return os.getpid(), torch.get_num_threads(), torch.rand(1).item()


def fail_on(failing_rank):
    if failing_rank in (dist.get_rank(), "all"):
        raise KeyError(f"planted on {dist.get_rank()}")
    dist.barrier()


def leave_on(failing_rank, how):
    if dist.get_rank() == failing_rank:
        how(3)
    dist.barrier()


def wait_for_nobody():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        time.sleep(1000)


def return_what_cannot_be_pickled():
    return lambda: None


def return_mixed():
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    return {"bf16": weight.detach().to(torch.bfloat16).T, "graph": (weight * 2)[1], "parameter": weight, "none": None}


@pytest.mark.parametrize("world", [1, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_world_size_gets_a_group_of_its_own(ranks, world, dtype):
    x = torch.arange(5).to(dtype)
    for rank, result in enumerate(ranks(world, sum_over_ranks, x, scale=2)):
        assert (result["rank"], result["world"], result["sum"].dtype) == (rank, world, dtype)
        assert torch.equal(result["sum"], x * 2 * sum(range(1, world + 1)))


def test_workers_are_reused_with_one_thread_and_the_same_seed(ranks):
    first, second = ranks(3, process_state), ranks(2, process_state)
    torch.manual_seed(0)
    expected = torch.rand(1).item()
    assert [pid for pid, *_ in first[:2]] == [pid for pid, *_ in second]
    assert {state[1:] for state in first + second} == {(1, expected)}


def test_results_keep_dtype_shape_and_values(ranks):
    (result,) = ranks(1, return_mixed)
    plain = return_mixed()
    assert torch.equal(result["bf16"], plain["bf16"]) and result["bf16"].dtype == torch.bfloat16
    assert torch.equal(result["graph"], plain["graph"]) and torch.equal(result["parameter"], plain["parameter"])


@pytest.mark.parametrize(
    "fn, args, message",
    [
        (fail_on, (1,), r"rank 1 of 3 running [\w.]*fail_on: Traceback(.|\n)*in fail_on\n(.|\n)*planted on 1"),
        (leave_on, (2, os._exit), r"rank 2 of 3 running [\w.]*leave_on: died with exit code 3"),
        (leave_on, (0, exit), r"rank 0 of 3 running [\w.]*leave_on: Traceback(.|\n)*SystemExit: 3"),
        (return_what_cannot_be_pickled, (), r"rank 0 of 3 running (.|\n)*Can't pickle"),
    ],
)
def test_a_failing_rank_is_reported_at_once_and_the_pool_lives_on(ranks, fn, args, message):
    patience, start = 600.0, time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        ranks(3, fn, *args, timeout=patience)
    assert time.monotonic() - start < patience / 2  # the others wait in a barrier that nobody else will enter
    assert [r["rank"] for r in ranks(3, sum_over_ranks, torch.ones(1))] == [0, 1, 2]


def test_every_failing_rank_is_reported(ranks):
    with pytest.raises(RuntimeError) as error:
        ranks(2, fail_on, "all")
    assert "planted on 0" in str(error.value) and "planted on 1" in str(error.value)


def test_a_hang_shows_every_rank_and_the_pool_lives_on(ranks):
    ranks(3, process_state)  # so that starting workers is not counted
    with pytest.raises(RuntimeError) as error:
        ranks(3, wait_for_nobody, timeout=1.0)
    head, *stacks = str(error.value).split("\nrank ")
    assert head == f"ranks [0, 1] of 3 running {__name__}.wait_for_nobody did not return in 1.0 s"
    assert "in wait_for_nobody" in stacks[0] and "all_reduce" in stacks[0]  # inside of the collective
    assert "in wait_for_nobody" in stacks[1] and "all_reduce" not in stacks[1]
    assert stacks[2] == "2: returned"
    assert len(ranks(3, process_state)) == 3


def test_errors_of_use(ranks):
    with pytest.raises(ValueError, match="world_size=0 is not a number of ranks; use 1 or more"):
        ranks(0, process_state)
    with pytest.raises(ValueError, match="pass a function defined at the top of a module"):
        ranks(1, lambda: None)


def test_close_ends_the_workers():
    with RankPool() as pool:
        pids = [pid for pid, *_ in pool.run(2, process_state)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_assert_close_rel():
    x = torch.linspace(-1, 1, 100, dtype=torch.float64)
    unit = torch.zeros_like(x)
    unit[3] = x.norm()  # so that adding c * unit is a relative difference of c
    assert_close_rel(x + 0.9e-5 * unit, x)
    with pytest.raises(AssertionError, match=r"qkv.bias: norm of the difference .* of 5.8"):
        assert_close_rel(x + 1.1e-5 * unit, x, name="qkv.bias")
    with pytest.raises(AssertionError, match="nan"):
        assert_close_rel(x * float("nan"), x)
    with pytest.raises(AssertionError, match=r"tensor: shape \(100, 1\), expected \(100,\)"):
        assert_close_rel(x[:, None], x)
    zero, eps = torch.zeros(4), torch.finfo(torch.float32).eps
    assert_close_rel(zero, zero)
    assert_close_rel(zero[:0], zero[:0])
    assert_close_rel(torch.tensor([0, 0, 0.9 * eps, 0]), zero)
    with pytest.raises(AssertionError, match="gradient: norm of the difference"):
        assert_close_rel(torch.tensor([0, 0, 1.1 * eps, 0]), zero, name="gradient")


def test_what_differs_from_one_process_is_found():
    """Of two ranks with a half of `a` each, of which one has `b`."""
    figures, whole = [{"loss": 2.0}, {"loss": 1.0}], {"a": torch.arange(4.0), "b": torch.ones(2)}
    (low, high), shards = whole["a"].split(2), [Shard(0, Axis("tp", rank, 2, ()), (4,)) for rank in (0, 1)]
    first, second = {"a": (low, shards[0])}, {"a": (high, shards[1]), "b": (whole["b"], None)}

    def compare(of_first=first, of_second=second, of_whole=whole, steps=figures):
        assert_same_training([(figures, of_first), (steps, of_second)], figures, of_whole, 1e-5)

    compare()
    wrong = [
        {"of_second": {"a": second["a"]}},  # no rank has `b`
        {"of_whole": {"a": whole["a"]}},
        {"of_first": {"a": (high, shards[0])}},
        {"of_second": second | {"b": (whole["b"] * 1.1, None)}},
        {"steps": [figures[0], {"loss": 1.1}]},
        {"steps": [{"loss": float("nan")}, figures[1]]},
    ]
    for change in wrong:
        with pytest.raises(AssertionError):
            compare(**change)
    with pytest.raises(ValueError):
        compare(steps=figures[:1])
