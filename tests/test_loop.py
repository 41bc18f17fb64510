"""What train.py passes on: a run equals a loop in which rates, step numbers, samples and modes are written out.

Every layout would share a mistake here, so that layouts which agree prove nothing.
"""

import dataclasses
import json
import math
import time
from itertools import count

import pytest
import torch

from layouts import GPT3, LLAMA, config, dataset_of, mesh_of
from minitron import pretrain
from minitron.checkpoint.reader import Reader
from minitron.comm.mesh import Mesh
from minitron.config import cli
from minitron.config.schema import Config
from minitron.data.loader import Loader
from minitron.model.layers import Norm
from minitron.parallel.linear import RowParallelLinear
from minitron.planner.dryrun.dryrun import fake_world
from minitron.runtime.log import Log
from minitron.testing import assert_close_rel
from minitron.train import Trainer, build

STEPS, BATCH, EVAL_STEPS = 6, 4, 3
RUN = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.vocab_size=96",
    "model.hidden_dropout=0.3",
    "model.init_std=0.2",
    "train.seq_len=32",
    "train.micro_batch_size=2",
    f"train.global_batch_size={BATCH}",
    f"train.steps={STEPS}",
    "train.eval_every=3",
    f"train.eval_steps={EVAL_STEPS}",
    "optimizer.lr=0.01",
    "optimizer.min_lr=0.001",
    "optimizer.warmup_steps=2",
    "precision.dtype=fp32",
    "data.source=mock",
    "data.separate_documents=true",
    "checkpoint.keep=0",
]


def rate_of(step: int) -> float:
    """Of RUN: linear to 0.01 in two steps, then half a cosine to 0.001 at the last one."""
    if step <= 2:
        return 0.01 * step / 2
    return 0.001 + (0.01 - 0.001) * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2))) / 2


@pytest.mark.parametrize(
    "keys, blocks",
    [
        ({"layers_per_stage": (2, 3, 1, 2)}, [[["0", "1"], ["5"]], [["2", "3", "4"], ["6", "7"]]]),
        ({}, [[["0", "1"], ["4", "5"]], [["2", "3"], ["6", "7"]]]),
    ],
    ids=["named", "even"],
)
def test_each_rank_has_the_layers_of_its_stages(keys, blocks):
    cfg, found = config(LLAMA, {"parallel": {"pp": 2, "vp": 2} | keys}), []
    for rank in range(2):
        with fake_world(2, rank, "cpu"):
            found.append([list(chunk.blocks) for chunk in build(cfg, mesh_of(cfg)).chunks])
    assert found == blocks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The configuration, the directory of checkpoints, and the records by their kind, of one run of RUN."""
    folder = tmp_path_factory.mktemp("run")
    argv = [*RUN, f"log.dir={folder}", f"checkpoint.dir={folder / 'saves'}", "checkpoint.every=3"]
    pretrain.main(argv)
    return cli.load(argv), folder / "saves", records_in(folder)


def records_in(folder) -> dict:
    """{kind: its records} of a run's log.dir."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {kind: [r for r in records if r["kind"] == kind] for kind in ("run", "step", "eval")}


def masters_of(trainer: Trainer) -> dict:
    return {p.spec.name: p.detach() for chunk in trainer.chunks for p in chunk.parameters()}


def masters_in(folder) -> dict:
    reader = Reader(folder)
    return {
        name: reader.read(name, "master", [0] * len(reader.shape(name)), reader.shape(name)) for name in reader.names()
    }


def test_a_run_is_a_plain_loop_over_steps(run):
    """Losses, logged figures and weights, bit for bit. Dropout depends on the step's number, weights on every rate."""
    cfg, saves, records = run
    trainer, data = build(cfg, Mesh.offline(1)), pretrain.build_data(cfg)
    assert [r["step"] for r in records["step"]] == list(range(1, STEPS + 1))
    assert [r["first_step"] for r in records["run"]] == [1]
    for step, record in zip(count(1), records["step"]):
        loader = Loader(data.train, cfg, trainer.mesh)
        figures = trainer.step(loader.step((step - 1) * BATCH, step), rate_of(step)).read()
        loader.close()
        assert record["learning_rate"] == pytest.approx(rate_of(step), rel=1e-12)
        assert record["consumed_samples"] == step * BATCH and record["skipped_total"] == record["nan_total"] == 0
        assert [record[key] for key in ("loss", "grad_norm")] == [figures[key] for key in ("loss", "grad_norm")]
        if step % 3 == 0:
            saved = masters_in(saves / f"step_{step:08d}")
            for name, master in masters_of(trainer).items():
                assert_close_rel(saved[name], master, 1e-7, f"{name} after step {step}")


def mean_loss(cfg, weights: dict, samples, num_samples: int, training: bool) -> float:
    """Of the model with these weights, per counted token of the first samples, one at a time."""
    one = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, micro_batch_size=1, global_batch_size=1))
    trainer = build(one, Mesh.offline(1))
    chunk, loader = trainer.chunks[0].train(training), Loader(samples, one, trainer.mesh)
    with torch.no_grad():
        for param in chunk.parameters():
            param.copy_(weights[param.spec.name])
        batches = [batch for i in range(num_samples) for batch in loader.step(i, step=0)]
        loader.close()
        return sum(float(chunk(batch)) for batch in batches) / sum(batch.count for batch in batches)


def test_an_evaluation_is_the_mean_of_all_its_batches_without_dropout(run):
    cfg, saves, records = run
    plain = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, hidden_dropout=0.0))
    data, everything = pretrain.build_data(cfg), BATCH * EVAL_STEPS
    assert [r["step"] for r in records["eval"]] == [3, 6]
    for record in records["eval"]:
        weights = masters_in(saves / f"step_{record['step']:08d}")
        mean = mean_loss(plain, weights, data.valid, everything, False)
        assert record["loss"] == pytest.approx(mean, rel=1e-6)  # float32 sums in another order
        for other in (
            mean_loss(plain, weights, data.valid, BATCH, False),  # the first batch alone
            mean_loss(plain, weights, data.train, everything, False),
            mean_loss(cfg, weights, data.valid, everything, True),
        ):
            assert abs(other - mean) > 1e-4, "the comparison would prove nothing"


def test_the_logged_loss_scale_is_the_one_that_the_step_had(tmp_path):
    """Of fp16 whose first scale overflows: the step that halves it was made with the whole."""
    argv = [
        *RUN,
        "precision.dtype=fp16",
        "precision.loss_scale=1e9",
        "precision.loss_scale_hysteresis=1",
        "train.eval_every=0",
        f"log.dir={tmp_path}",
    ]
    pretrain.main(argv)
    cfg = cli.load(argv)
    trainer, data = build(cfg, Mesh.offline(1)), pretrain.build_data(cfg)
    loader, expected, steps = Loader(data.train, cfg, trainer.mesh), [], records_in(tmp_path)["step"]
    for step in range(1, STEPS + 1):
        expected.append((float(trainer.scaler.scale), trainer.step(loader.step((step - 1) * BATCH, step), 0.0).skipped))
    loader.close()
    assert expected[0][1] == 1 and expected[1][0] == expected[0][0] / 2
    skipped = [float(sum(flag for _, flag in expected[: i + 1])) for i in range(STEPS)]
    assert [r["loss_scale"] for r in steps] == [scale for scale, _ in expected]
    assert [r["skipped_total"] for r in steps] == skipped and not any(r["nan_total"] for r in steps)


def test_an_evaluation_takes_no_time_of_the_next_step(tmp_path, monkeypatch):
    """It takes 1,000 s here by a clock that is put on."""
    clock, late, evaluation = time.perf_counter, [0.0], Log.evaluation

    def slow(*args):
        evaluation(*args)
        late[0] += 1000.0

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])
    monkeypatch.setattr(Log, "evaluation", slow)
    pretrain.main([*RUN, f"log.dir={tmp_path}"])
    seconds = [r["step_seconds"] for r in records_in(tmp_path)["step"]]
    assert late == [2000.0] and len(seconds) == STEPS and 0 < min(seconds) and max(seconds) < 1000.0


@pytest.mark.parametrize("documents", [None, 16])
def test_samples_are_those_of_the_seed(documents):
    """As weights and dropout are (tests/model/test_model.py)."""
    drawn = []
    for seed in (1, 1, 7):
        argv = [*RUN, f"train.seed={seed}", f"data.document_length={documents or 'null'}"]
        data = pretrain.build_data(cli.load(argv))
        drawn.append([part[0].tokens.tolist() for part in (data.train, data.valid)])
    assert drawn[0] == drawn[1] and not {tuple(x) for x in drawn[0]} & {tuple(x) for x in drawn[2]}
    assert drawn[0][0] != drawn[0][1]


def test_dropout_differs_from_step_to_step_and_evaluation_has_none():
    """At learning rate 0, so that nothing but the step's number can make a difference."""
    dropping = config(GPT3, {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.2, "num_layers": 2}})
    for cfg in (
        dropping,
        dataclasses.replace(dropping, model=dataclasses.replace(dropping.model, hidden_dropout=0.0)),
        dataclasses.replace(dropping, model=dataclasses.replace(dropping.model, attention_dropout=0.0)),
    ):
        trainer = build(cfg, Mesh.offline(1))
        loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
        figures = [trainer.step(loader.step(0, step), 0.0).read() for step in (1, 2, 3, 1)]
        assert len({f["loss"] for f in figures}) == 3 and figures[0] == figures[3]  # nothing is left of those between
        plain = dataclasses.replace(
            cfg, model=dataclasses.replace(cfg.model, hidden_dropout=0.0, attention_dropout=0.0)
        )
        without = build(plain, Mesh.offline(1)).step(loader.step(0, 1), 0.0).read()["loss"]
        for step in (0, 1):
            total, tokens = trainer.evaluate(loader.step(0, step)).tolist()
            assert total / tokens == pytest.approx(without, rel=1e-6)
        loader.close()


def evaluated_after_a_step(cfg: Config) -> list[float]:
    """At learning rate 0: the loss sum and the tokens."""
    torch.set_num_threads(1)
    trainer = build(cfg, mesh_of(cfg))
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    trainer.step(loader.step(0, 0), 0.0)
    found = trainer.evaluate(loader.step(0, 1)).tolist()
    loader.close()
    return found


@pytest.mark.parametrize("vp", [1, 2])
def test_no_chunk_of_a_rank_drops_in_an_evaluation(ranks, vp):
    layout = {"model": {"num_layers": 4}, "parallel": {"pp": 2, "vp": vp}}
    with_dropout, without = (
        ranks(2, evaluated_after_a_step, config(GPT3, layout, {"model": {"hidden_dropout": p}})) for p in (0.5, 0.0)
    )
    assert with_dropout == without


# ---- what belongs to a parameter -------------------------------------------------------------------------------------


def expected_of(model: torch.nn.Module) -> dict:
    """{name: whether it is a matrix that weight decay is for}: weights of products and embeddings, no norm, no bias."""
    return {
        param.spec.name: not isinstance(module, Norm) and name != "bias"
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
    }


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_matrices_decay_norms_and_biases_do_not(base):
    """The same step with and without weight decay: weights differ by lr * decay * weight where they decay."""
    after, before = [], {}
    for decay in (0.0, 0.5):
        cfg = config(base, {"optimizer": {"weight_decay": decay}, "model": {"num_layers": 2}})
        trainer = build(cfg, Mesh.offline(1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in trainer.chunks[0].parameters():
                if param.dim() == 1:  # biases begin at zero, which decays to zero
                    param.add_(torch.rand(param.shape, generator=generator) + 1)
        before = {name: master.clone() for name, master in masters_of(trainer).items()}
        loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
        trainer.step(loader.step(0, 1), 0.1)
        loader.close()
        after.append(masters_of(trainer))
    decaying = expected_of(trainer.chunks[0])
    assert decaying.keys() == before.keys() and len(set(decaying.values())) == 2
    for name, decays in decaying.items():
        lost = after[0][name] - after[1][name]
        if decays:  # the rounding of weights, 6e-8, against the 5 % that go
            assert_close_rel(lost, 0.1 * 0.5 * before[name], 1e-4, name)
        else:
            assert not lost.any(), f"{name} decays"


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_weights_begin_with_their_deviation_and_those_that_write_to_the_stream_with_less(base):
    """GPT-2's rule: 2 layers of products per block add to the residual stream, so theirs is divided by sqrt(2 L)."""
    cfg = config(base, {"model": {"hidden_size": 64, "ffn_hidden_size": 128}})
    model, m = build(cfg, Mesh.offline(1)).chunks[0], cfg.model
    decaying, writing = expected_of(model), 0
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if not decaying[param.spec.name]:
                assert (param == (1.0 if name == "weight" else 0.0)).all(), param.spec.name
                continue
            writes = isinstance(module, RowParallelLinear)
            std, writing = m.init_std / math.sqrt(2 * m.num_layers) if writes else m.init_std, writing + writes
            # the deviation of n samples varies by 1 / sqrt(2 n): four of those
            tolerance = 4 / math.sqrt(2 * param.numel())
            assert float(param.detach().std()) == pytest.approx(std, rel=tolerance), param.spec.name
            assert abs(float(param.detach().mean())) < 4 * std / math.sqrt(param.numel())
    assert writing == 2 * m.num_layers


@pytest.mark.parametrize("rerun", ["on", "off"])
def test_numerics_watch_what_checks_the_steps(rerun):
    """A step is run again beneath them, so that their figures are those of the step that counts."""
    trainer = build(config(LLAMA, {"train": {"rerun": rerun}, "log": {"numerics_every": 1}}), Mesh.offline(1))
    below = trainer.rerun or trainer.runner
    assert trainer.numerics.runner is below and (trainer.rerun is None) == (rerun == "off")
    assert trainer.rerun is None or trainer.rerun.runner is trainer.runner
