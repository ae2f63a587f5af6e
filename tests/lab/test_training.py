import math

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab.digits import load_digits
from fsdp_ema_lib.lab.flow import VelocityField, cycled_labels, sample
from fsdp_ema_lib.lab.frechet import DigitDistance
from fsdp_ema_lib.lab.training import History, TrainingConfig, build_model, make_optimizer, relative_distance, train

SMALL = {"hidden": 32, "blocks": 2, "batch_size": 16}


def run(wrapper, *, steps=12, eval_every=5, decays=(0.5, 0.9), evaluate=None, **config):
    """Train a small model; returns the history, the model and its averages."""
    config = TrainingConfig(steps=steps, eval_every=eval_every, wrapper=wrapper, **(SMALL | config))
    model = build_model(config)
    emas = {f"EMA {decay}": EMA_FSDP(model, decay) for decay in decays}
    return train(model, load_digits().train, config, emas=emas, evaluate=evaluate, progress=False), model, emas


def ink(model):
    """A number that any difference of the weights changes."""
    return {"ink": float(sample(model, cycled_labels(4), steps=2).abs().double().sum())}


def worker_run(wrapper, **arguments):
    history, model, emas = run(wrapper, evaluate=ink, **arguments)
    full = {name: ema.full_state_dict(model) for name, ema in emas.items()}
    return history, full


# --- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": 10.0}, "steps must be a whole number of at least 1, got 10.0"),
        ({"batch_size": True}, "batch_size must be a whole number of at least 1, got True"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"eval_every": 0}, "eval_every must be a whole number of at least 1, got 0"),
        ({"threads": 0}, "threads must be a whole number of at least 1, got 0"),
        ({"hidden": 33}, "hidden must be even, got 33"),
        ({"learning_rate": 0}, "learning_rate must be a positive number, got 0"),
        ({"learning_rate": math.nan}, "learning_rate must be a positive number, got nan"),
        ({"learning_rate": "2e-3"}, "learning_rate must be a positive number, got '2e-3'"),
        ({"sharding": "half"}, "sharding must be one of 'full', 'hybrid_full', 'hybrid_zero2', 'no_shard', got 'half'"),
        ({"wrapper": "ddp"}, "wrapper must be one of 'fsdp1', 'fsdp2', 'none', got 'ddp'"),
        ({"wrapper": "none", "mixed_precision": True}, 'mixed_precision needs wrapper "fsdp1" or "fsdp2"'),
        ({"steps": 0, "seed": -1}, "steps must be .* got 0; seed must be .* got -1"),
    ],
)
def test_an_impossible_configuration_is_refused(values, complaint):
    with pytest.raises(ValueError, match=complaint):
        TrainingConfig(**values)


# --- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2", "none"])
def test_two_runs_are_identical(lone_rank, wrapper):
    torch.manual_seed(1)
    first, _, one = run(wrapper, evaluate=ink)
    torch.manual_seed(2)  # the global random state plays no part
    second, _, two = run(wrapper, evaluate=ink)
    assert first == second
    for name in one:
        assert all(torch.equal(one[name].shadow[key], two[name].shadow[key]) for key in one[name].shadow)
    other, _, _ = run(wrapper, seed=1, evaluate=ink)
    assert other.losses != first.losses


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_one_rank_trains_as_the_plain_model(lone_rank, wrapper):
    history, model, _ = run(wrapper)
    assert isinstance(model, FullyShardedDataParallel if wrapper == "fsdp1" else FSDPModule)
    assert history.losses == pytest.approx(run("none")[0].losses, rel=1e-5)


def test_no_warning_reaches_the_user_at_one_rank(lone_rank, recwarn):
    run("fsdp1", evaluate=ink)
    run("fsdp2", evaluate=ink)
    assert [str(warning.message) for warning in recwarn if "sharding_strategy" in str(warning.message)] == []


def test_evaluations_come_at_their_steps_and_at_the_last():
    history, _, _ = run("none", steps=12, eval_every=5, evaluate=ink)
    steps, values = history.series("ink")
    assert steps == [5, 10, 12]
    assert {name: len(series) for name, series in values.items()} == {"live": 3, "EMA 0.5": 3, "EMA 0.9": 3}
    assert len(history.losses) == 12
    distance_steps, distances = history.series("distance_to_live")
    assert distance_steps == [5, 10, 12] and set(distances) == {"EMA 0.5", "EMA 0.9"}
    assert all(long > short > 0 for short, long in zip(distances["EMA 0.5"], distances["EMA 0.9"], strict=True))


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2", "none"])
def test_looking_does_not_disturb_training(lone_rank, wrapper):
    watched, _, _ = run(wrapper, eval_every=2, evaluate=ink)
    unwatched, _, _ = run(wrapper, eval_every=12, decays=())
    assert watched.losses == unwatched.losses


def test_training_uses_the_threads_it_was_given_and_puts_back_those_it_found():
    before, seen = torch.get_num_threads(), []

    def evaluate(model):
        seen.append(torch.get_num_threads())
        return {}

    for threads in (1, 2):
        run("none", steps=1, decays=(), evaluate=evaluate, threads=threads)
    assert seen == [1, 2]
    assert torch.get_num_threads() == before


def test_each_evaluation_sees_its_own_weights():
    history, model, emas = run("none", evaluate=ink)
    _, values = history.series("ink")
    assert values["live"][-1] == ink(model)["ink"]
    for name, ema in emas.items():
        plain = VelocityField(SMALL["hidden"], SMALL["blocks"])
        plain.load_state_dict(ema.full_state_dict(model), strict=True)
        assert values[name][-1] == ink(plain)["ink"]
    assert len({series[-1] for series in values.values()}) == 3


def test_the_average_follows_the_weights_of_every_step():
    """Train step by step with `first_step`, and average in float64 what stands in the model after each."""
    config = TrainingConfig(steps=6, wrapper="none", **SMALL)
    model = build_model(config)
    ema, optimizer = EMA_FSDP(model, 0.8), make_optimizer(model, config)
    reference = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    for step in range(1, 7):
        one = TrainingConfig(steps=step, wrapper="none", **SMALL)
        train(model, load_digits().train, one, emas={"EMA": ema}, optimizer=optimizer, first_step=step, progress=False)
        for name, p in model.named_parameters():
            reference[name].mul_(0.8).add_(p.detach().double(), alpha=0.2)
    for name, expected in reference.items():
        assert (ema.shadow[name].double() - expected).norm() < 1e-6 * expected.norm(), name


def test_a_run_in_two_parts_gives_the_losses_of_one():
    straight, model, _ = run("none", steps=12)
    split = load_digits().train
    config = TrainingConfig(steps=12, wrapper="none", **SMALL)
    halves = build_model(config)
    optimizer = make_optimizer(halves, config)
    first = train(halves, split, TrainingConfig(steps=7, wrapper="none", **SMALL), optimizer=optimizer, progress=False)
    second = train(halves, split, config, optimizer=optimizer, first_step=8, progress=False)
    assert first.losses + second.losses == straight.losses
    for one, two in zip(model.parameters(), halves.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_run_that_is_told_to_stop_measures_its_last_step_and_ends_there():
    config = TrainingConfig(steps=12, eval_every=5, wrapper="none", **SMALL)
    model, seen = build_model(config), []
    optimizer = make_optimizer(model, config)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    history = train(
        model,
        load_digits().train,
        config,
        emas={"EMA": EMA_FSDP(model, 0.9)},
        optimizer=optimizer,
        scheduler=scheduler,
        progress=False,
        should_stop=lambda: len(seen) == 6,
        after_step=lambda step, history: seen.append((step, len(history.losses))),
    )
    assert seen == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 5), (6, 5), (7, 7)]
    assert len(history.losses) == 7 and [record["step"] for record in history.records] == [5, 5, 7, 7]
    assert optimizer.param_groups[0]["lr"] == config.learning_rate / 2**7


def test_training_learns_to_draw_digits():
    digits = load_digits()
    distance = DigitDistance(digits)
    config = TrainingConfig(steps=200, wrapper="none", hidden=256, blocks=2)
    model = build_model(config)
    draw = lambda: distance(sample(model, cycled_labels(300), steps=8))  # noqa: E731
    before = draw()
    history = train(model, digits.train, config, progress=False)
    assert draw() < 0.1 * before
    assert sum(history.losses[-20:]) < 0.6 * sum(history.losses[:20])


def test_relative_distance_is_the_norm_of_the_difference_over_the_norm():
    _, model, emas = run("none")
    ema = emas["EMA 0.9"]
    weights = {name: p.detach() for name, p in model.named_parameters()}
    apart = sum(float((ema.shadow[n].double() - p.double()).square().sum()) for n, p in weights.items())
    size = sum(float(p.double().square().sum()) for p in weights.values())
    assert relative_distance(ema, model) == pytest.approx(math.sqrt(apart / size), rel=1e-9)


def test_divergence_is_named_by_its_step():
    config = TrainingConfig(steps=6, wrapper="none", **SMALL)
    model = build_model(config)
    with torch.no_grad():
        model.output.bias.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="the loss became nan at step 1: training diverged, lower"):
        train(model, load_digits().train, config, progress=False)


@pytest.mark.parametrize(
    ("emas", "first_step", "complaint"),
    [
        ({"live": None}, 1, 'the name "live" stands for the trained weights'),
        ({}, 0, "first_step must be from 1 to steps = 6, got 0"),
        ({}, 7, "first_step must be from 1 to steps = 6, got 7"),
    ],
)
def test_a_run_that_cannot_start_changes_nothing(emas, first_step, complaint):
    config = TrainingConfig(steps=6, wrapper="none", **SMALL)
    model = build_model(config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=complaint):
        train(model, load_digits().train, config, emas=emas, first_step=first_step, progress=False)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_metric_that_was_not_measured_is_named_with_those_that_were():
    history, _, _ = run("none", steps=2)
    with pytest.raises(ValueError, match="no record has 'frechet'; measured were: distance_to_live"):
        history.series("frechet")
    with pytest.raises(ValueError, match="no record has 'frechet'; measured were: nothing"):
        History().series("frechet")


@pytest.mark.parametrize(("asked", "ci", "shown"), [(None, "1", False), (True, "1", True), (False, "", False)])
def test_the_progress_bar_is_quiet_where_it_should_be(monkeypatch, capsys, asked, ci, shown):
    monkeypatch.setenv("CI", ci)
    config = TrainingConfig(steps=2, wrapper="none", **SMALL)
    train(build_model(config), load_digits().train, config, progress=asked)
    assert ("training" in capsys.readouterr().err) == shown


# --- several ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed_precision", [False, True])
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_two_ranks_follow_the_run_of_one(ranks, lone_rank, wrapper, mixed_precision):
    expected, model, emas = run(wrapper, evaluate=ink, mixed_precision=mixed_precision)
    results = ranks(2, worker_run, wrapper=wrapper, mixed_precision=mixed_precision)
    tolerance = 1e-2 if mixed_precision else 1e-4
    histories = [history for history, _ in results]
    assert histories[0] == histories[1], "the ranks report different numbers"
    assert histories[0].losses == pytest.approx(expected.losses, rel=tolerance)
    assert [r["weights"] for r in histories[0].records] == [r["weights"] for r in expected.records]
    for found, wanted in zip(histories[0].records, expected.records, strict=True):
        assert found["step"] == wanted["step"]
        assert found["ink"] == pytest.approx(wanted["ink"], rel=tolerance)
        if "distance_to_live" in wanted:
            assert found["distance_to_live"] == pytest.approx(wanted["distance_to_live"], rel=10 * tolerance)
    for name, ema in emas.items():
        gathered, alone = results[0][1][name], ema.full_state_dict(model)
        assert list(gathered) == list(alone)
        for key in alone:
            assert (gathered[key] - alone[key]).norm() <= 10 * tolerance * alone[key].norm() + 1e-3, f"{name} {key}"
        assert results[1][1][name] == {}


def worker_refused(batch_size, wrapper):
    try:
        config = TrainingConfig(steps=2, wrapper=wrapper, **(SMALL | {"batch_size": batch_size}))
        train(build_model(config), load_digits().train, config, progress=False)
    except ValueError as error:
        return str(error)


def test_what_several_ranks_cannot_do_is_refused_on_every_rank(ranks):
    for message in ranks(2, worker_refused, batch_size=15, wrapper="fsdp2"):
        assert "must be a multiple of the world size 2, got 15" in message
    for message in ranks(2, worker_refused, batch_size=16, wrapper="none"):
        assert 'wrapper "none" does not exchange gradients and needs a single rank, this job has 2' in message
