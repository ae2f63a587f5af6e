import random
import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab import own_model
from fsdp_ema_lib.lab.own_model import Hooks, StudyConfig, averages, build_model, jitter, load_hooks, study

PATHS = {"model": "my_pkg.models:build", "data": "my_pkg.data:batches", "loss": "my_pkg.models:loss"}
TRUTH = torch.tensor([[2.0, -1.0, 0.5]])

# What a reader's package looks like.
MODELS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()

class Net(nn.Linear):
    @classmethod
    def small(cls):
        return cls(3, 1)

number = 5

def two_arguments(width, depth):
    return nn.Linear(width, depth)
"""
DATA = """
import torch

def batches(train, seed):
    generator = torch.Generator().manual_seed(seed + (0 if train else 10**6))
    for _ in range(6):
        x = torch.randn(8, 3, generator=generator)
        yield {"x": x, "y": x.sum(1, keepdim=True)}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `my_pkg` in a folder that Python does not know yet; returns the folder."""
    folder = tmp_path / "code" / "my_pkg"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "models.py").write_text(MODELS)
    (folder / "data.py").write_text(DATA)
    (folder / "broken.py").write_text("import a_package_that_nobody_has\n")
    (folder / "wrong.py").write_text("1 / 0\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder.parent
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_pkg"]:
        del sys.modules[name]


def line():
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


def points(train, seed):
    generator = torch.Generator().manual_seed(seed + (0 if train else 10**6))
    for _ in range(6):
        x = torch.randn(8, 3, generator=generator)
        yield x, x @ TRUTH.T


def squared_error(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def hooks(model=line, data=points, loss=squared_error):
    return Hooks(model, data, loss, PATHS)


def run(hooks, *, decays=(0.5, 0.9), **config):
    config = StudyConfig(**({"steps": 10, "eval_every": 4, "sharding": "none"} | config))
    model = build_model(hooks, config)
    emas = {f"EMA {decay}": EMA_FSDP(model, decay) for decay in decays}
    return study(model, hooks, config, emas, progress=False), model, emas


# --- import paths ------------------------------------------------------------------------------------------------


def test_a_package_in_a_folder_of_ones_own_is_found_and_studied(package):
    found = load_hooks(*PATHS.values(), code_dir=package)
    result, _, _ = run(found)
    assert result.history.series("loss")[0] == [4, 8, 10]
    assert result.batches == 6


def test_a_package_on_the_path_needs_no_folder(package):
    sys.path.insert(0, str(package))
    dotted = load_hooks("my_pkg.models:Net.small", PATHS["data"], PATHS["loss"])
    assert type(dotted.model()).__name__ == "Net"


def test_a_relative_folder_hangs_from_the_repository(package, monkeypatch):
    (package.parent / "pyproject.toml").touch()
    (package.parent / "notebooks").mkdir()
    monkeypatch.chdir(package.parent / "notebooks")
    assert load_hooks(*PATHS.values(), code_dir="code").named("data") == "data=my_pkg.data:batches"


@pytest.mark.parametrize(
    ("role", "path", "error", "text"),
    [
        ("model", "my_pkg.models", ValueError, r"expected package\.module:name, such as model=my_pkg\.models:model"),
        ("model", "my_pkg/models.py:build", ValueError, r"expected package\.module:name"),
        ("data", "my_pkg.data:", ValueError, r"expected package\.module:name"),
        ("data", "your_pkg.data:batches", ImportError, "there is no module your_pkg on Python's path.*code_dir"),
        ("loss", "my_pkg.losses:loss", ImportError, r"there is no module my_pkg\.losses on Python's path"),
        (
            "model",
            "my_pkg.broken:build",
            ImportError,
            "importing my_pkg.broken failed with ModuleNotFoundError: No module named 'a_package_that_nobody_has'",
        ),
        ("model", "my_pkg.wrong:build", ImportError, "importing my_pkg.wrong failed with ZeroDivisionError: division"),
        ("model", "my_pkg.models:bulid", AttributeError, r"my_pkg\.models has no bulid; did you mean build\?"),
        ("model", "my_pkg.models:Net.large", AttributeError, "Net has no large"),
        ("loss", "my_pkg.models:number", TypeError, r"expected a callable loss\(model, batch\), found int"),
        (
            "model",
            "my_pkg.models:two_arguments",
            TypeError,
            r"expected a callable model\(\), found two_arguments\(width, depth\): missing a required argument: 'width'",
        ),
        (
            "data",
            "my_pkg.models:build",
            TypeError,
            r"expected a callable data\(train: bool, seed: int\), found build\(\): got an unexpected keyword",
        ),
    ],
)
def test_an_import_path_that_leads_nowhere_says_where_it_ends(package, role, path, error, text):
    with pytest.raises(error, match=f"^{role}={path}: .*{text}"):
        load_hooks(**(PATHS | {role: path}), code_dir=package)


def test_a_folder_that_is_none_is_refused(tmp_path):
    before = list(sys.path)
    with pytest.raises(FileNotFoundError, match="code_dir: .*nowhere is no folder; name the one that holds your pack"):
        load_hooks(*PATHS.values(), code_dir=tmp_path / "nowhere")
    assert sys.path == before


# --- what the callables return -----------------------------------------------------------------------------------


def frozen():
    return line().requires_grad_(False)


def on_meta():
    with torch.device("meta"):
        return nn.Linear(3, 1)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (
            {"model": dict},
            TypeError,
            r"model=my_pkg\.models:build: expected it to return a torch\.nn\.Module, found di",
        ),
        ({"model": frozen}, ValueError, "model=.*expected a parameter that requires a gradient, found none"),
        (
            {"model": on_meta},
            ValueError,
            "model=.*tensors on the meta device have no values: weight, bias. Build the m",
        ),
        ({"data": lambda train, seed: None}, TypeError, "data=.*an iterable of batches for train=False, found None"),
        (
            {"data": lambda train, seed: 5 if train else points(train, seed)},
            TypeError,
            "data=.*for train=True, found int 5",
        ),
        ({"data": lambda train, seed: []}, ValueError, "data=.*expected at least one held-out batch with train=False"),
        (
            {"data": lambda train, seed: [] if train else points(train, seed)},
            ValueError,
            "data=.*expected at least 1 training batches, one for each rank, found 0 with train=True",
        ),
        (
            {"loss": lambda model, batch: 0.5},
            TypeError,
            r"loss=.*scalar floating.*found float 0\.5\. Return the tensor",
        ),
        (
            {"loss": lambda model, batch: model(batch[0])},
            ValueError,
            r"loss=.*found a torch\.float32 tensor of shape \(8, 1\)\. Take the mean",
        ),
        ({"loss": lambda model, batch: torch.tensor(3)}, ValueError, r"found a torch\.int64 tensor of shape \(\)"),
        (
            {"loss": lambda model, batch: squared_error(model, batch).detach()},
            ValueError,
            "loss=.*a loss that depends on trainable weights, found one without a gradient",
        ),
    ],
)
def test_a_wrong_return_names_the_import_path_and_what_was_found(wrong, error, text):
    with pytest.raises(error, match=text):
        run(hooks(**wrong))


def test_a_loss_that_is_not_finite_names_its_step():
    count = iter(range(100))

    def loss(model, batch):
        return squared_error(model, batch) * (float("nan") if model.training and next(count) == 1 else 1.0)

    with pytest.raises(FloatingPointError, match="the loss became nan at step 2"):
        run(hooks(loss=loss))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"eval_batches": True}, "eval_batches must be a whole number of at least 1, got True"),
        ({"learning_rate": float("inf")}, "learning_rate must be a positive number, got inf"),
        ({"sharding": "ddp"}, "sharding must be one of 'none', 'fsdp1', 'fsdp2', got 'ddp'"),
        ({"seed": -1, "threads": 0}, "seed must be .* got -1; threads must be .* got 0"),
    ],
)
def test_an_impossible_configuration_is_refused(values, complaint):
    with pytest.raises(ValueError, match=complaint):
        StudyConfig(**values)


def test_a_study_without_an_average_or_with_one_called_live_is_refused():
    with pytest.raises(ValueError, match="at least one average to study, got none"):
        run(hooks(), decays=())
    model = line()
    with pytest.raises(ValueError, match='the name "live" stands for the trained weights'):
        study(model, hooks(), StudyConfig(sharding="none"), {"live": EMA_FSDP(model, 0.9)})


# --- the study itself --------------------------------------------------------------------------------------------


def test_a_study_measures_what_a_loop_by_hand_measures():
    given = hooks()
    result, _, emas = run(given, steps=8, eval_every=8, learning_rate=0.01, seed=3, eval_batches=2)
    config = StudyConfig(sharding="none", seed=3)
    model = build_model(given, config)
    reference = {name: value.detach().double().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = own_model._training_batches(given, 3)  # their order has tests of its own
    losses = []
    for _ in range(8):
        loss = squared_error(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for name, value in model.named_parameters():
            reference[name].mul_(0.9).add_(value.detach().double(), alpha=0.1)
    held_out = list(points(False, own_model._Randomness("held out", 0).seed))[:2]
    live = np.mean([squared_error(model, batch).item() for batch in held_out])
    apart = sum((reference[n] - v.detach().double()).square().sum() for n, v in model.named_parameters())
    size = sum(v.detach().double().square().sum() for v in model.parameters())
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(reference[name])
    averaged = np.mean([squared_error(model, batch).item() for batch in held_out])

    assert result.history.losses == pytest.approx(losses, rel=1e-6)
    assert result.batches == 2
    _, measured = result.history.series("loss")
    assert measured["live"] == pytest.approx([live], rel=1e-6)
    assert measured["EMA 0.9"] == pytest.approx([averaged], rel=1e-5)
    (distance,) = result.history.series("distance_to_live")[1]["EMA 0.9"]
    assert distance == pytest.approx(float((apart / size) ** 0.5), rel=1e-4)
    assert emas["EMA 0.9"].num_updates == 8


def test_two_studies_are_identical_and_another_seed_is_another_study():
    def noisy(model, batch):
        draws = torch.rand(1) + random.random() + np.random.rand()
        return squared_error(nn.Sequential(model, nn.Dropout(0.5)), batch) * draws

    torch.manual_seed(1)
    first, _, _ = run(hooks(loss=noisy))
    torch.manual_seed(2)
    second, _, _ = run(hooks(loss=noisy))
    other, _, _ = run(hooks(loss=noisy), seed=1)
    assert first == second
    assert other.history.losses != first.history.losses


def test_the_global_random_state_is_left_as_it_was():
    def draws():
        return torch.rand(1).item(), random.random(), np.random.rand()

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = draws()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    run(hooks())
    assert draws() == expected


def test_looking_does_not_disturb_training_and_every_look_sees_the_same_noise():
    def noisy(model, batch):
        return squared_error(model, batch) + torch.rand(())

    def constant(model, batch):  # depends on the noise alone
        return 0 * squared_error(model, batch) + torch.rand(())

    often, _, _ = run(hooks(loss=noisy), eval_every=1)
    seldom, _, _ = run(hooks(loss=noisy), eval_every=10)
    assert often.history.losses == seldom.history.losses
    measured, _, _ = run(hooks(loss=constant), eval_every=1)
    assert len({record["loss"] for record in measured.history.records}) == 1
    assert len(set(measured.history.losses)) == 10


def test_held_out_batches_are_judged_in_eval_mode_without_gradients_and_modes_are_put_back():
    seen = set()

    def loss(model, batch):
        seen.add((model.training, torch.is_grad_enabled(), model[1].training))
        return squared_error(model, batch)

    def built():
        model = line()
        model[1].eval()
        return model

    _, model, _ = run(hooks(model=built, loss=loss))
    assert seen == {(True, True, True), (False, False, False)}
    assert model.training and not model[1].training


def test_every_pass_over_the_data_has_a_seed_of_its_own_and_held_out_data_have_one():
    asked = []

    def data(train, seed):
        asked.append((train, seed))
        return points(train, seed)

    for seed in (0, 1):
        run(hooks(data=data), steps=13, seed=seed)  # three passes of six batches
    training = [seed for train, seed in asked if train]
    assert len(training) == len(set(training)) == 6
    assert len({seed for train, seed in asked if not train}) == 1
    assert all(0 <= seed < 2**32 for _, seed in asked)


def test_a_data_loader_that_shuffles_by_the_global_generator_is_taken_as_it_is():
    table = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(8, 3), torch.zeros(8, 1))

    def data(train, seed):
        return torch.utils.data.DataLoader(table, batch_size=2, shuffle=train)

    batches = own_model._training_batches(hooks(data=data), 0)
    passes = [torch.cat([next(batches)[0][:, 0] for _ in range(4)]).tolist() for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0]
    assert passes[0] != passes[1]
    again = own_model._training_batches(hooks(data=data), 0)
    assert torch.cat([next(again)[0][:, 0] for _ in range(4)]).tolist() == passes[0]


Pair = namedtuple("Pair", ["x", "y"])


def test_every_tensor_of_a_batch_is_moved_and_nothing_else_is_touched():
    x = torch.zeros(2)
    batch = {"pair": Pair(x, [x, "label"]), "n": 3, "nothing": None}
    moved = own_model._to(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].x.is_meta and moved["pair"].y[0].is_meta
    assert (moved["pair"].y[1], moved["n"], moved["nothing"]) == ("label", 3, None)


def test_averages_stand_in_the_order_of_their_memory_and_equal_ones_stand_once():
    assert list(averages(line(), 0.99999, [0.5, 0.99999])) == ["EMA 0.5", "EMA 0.99999", "EMA 0.99999, warm-up"]


def test_jitter_is_the_deviation_of_white_noise_and_sees_no_slope():
    noise = np.random.default_rng(0).normal(0, 0.3, 20_000)
    assert jitter(noise) == pytest.approx(0.3, rel=0.02)
    assert jitter(noise + np.arange(20_000) * 5.0) == pytest.approx(jitter(noise), rel=1e-6)
    with pytest.raises(ValueError, match="at least 3 of its values, got 2"):
        jitter([1.0, 2.0])


# --- shards and ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_a_sharded_model_on_one_rank_is_studied_as_the_plain_one(lone_rank, recwarn, sharding):
    sharded, model, _ = run(hooks(), sharding=sharding)
    plain, _, _ = run(hooks())
    assert isinstance(model, FullyShardedDataParallel if sharding == "fsdp1" else FSDPModule)
    assert sharded.history.losses == pytest.approx(plain.history.losses, rel=1e-5)
    for metric in ("loss", "distance_to_live"):
        for name, values in plain.history.series(metric)[1].items():
            assert sharded.history.series(metric)[1][name] == pytest.approx(values, rel=1e-4), (metric, name)
    assert [str(warning.message) for warning in recwarn if "sharding_strategy" in str(warning.message)] == []


def worker_study(sharding, data):
    result, _, _ = run(hooks(data=data), sharding=sharding, steps=7)
    batches = own_model._training_batches(hooks(data=data), 0)
    return result, [next(batches)[0] for _ in range(3)]


def halves(train, seed):
    """The batches of `points` in halves, so that two ranks together see what one sees."""
    for x, y in points(train, seed):
        yield from zip(x.split(4), y.split(4), strict=True) if train else [(x, y)]


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_two_ranks_that_share_the_batches_are_one_study(ranks, sharding):
    (first, first_batches), (second, second_batches) = ranks(2, worker_study, sharding=sharding, data=halves)
    expected, _, _ = run(hooks(), steps=7)
    whole = own_model._training_batches(hooks(), 0)
    for one, other in zip(first_batches, second_batches, strict=True):
        assert torch.equal(torch.cat([one, other]), next(whole)[0])
    for result in (first, second):
        assert result.history.losses == pytest.approx(expected.history.losses, rel=1e-5)
        for metric in ("loss", "distance_to_live"):
            for name, values in expected.history.series(metric)[1].items():
                assert result.history.series(metric)[1][name] == pytest.approx(values, rel=1e-4), (metric, name)


def five(train, seed):
    return list(points(train, seed))[:5]


def worker_too_few():
    batches = own_model._training_batches(hooks(data=five), 0)
    dealt = [next(batches)[0] for _ in range(3)]  # two rounds of two, and the fifth batch is left out
    with pytest.raises(ValueError, match="at least 2 training batches, one for each rank, found 1"):
        next(own_model._training_batches(hooks(data=lambda train, seed: five(train, seed)[:1]), 0))
    with pytest.raises(ValueError, match='sharding "none" .* needs a single rank, this job has 2'):
        build_model(hooks(), StudyConfig(sharding="none"))
    return dealt


def test_a_round_that_is_not_complete_is_left_out_on_every_rank(ranks):
    first, second = ranks(2, worker_too_few)
    seeds = [own_model._Randomness("data", 0, epoch).seed for epoch in (0, 1)]
    of_first_pass, of_second_pass = (list(points(True, seed)) for seed in seeds)
    expected = [of_first_pass[0], of_first_pass[2], of_second_pass[0]]
    assert all(torch.equal(mine, x) for mine, (x, _) in zip(first, expected, strict=True))
    expected = [of_first_pass[1], of_first_pass[3], of_second_pass[1]]
    assert all(torch.equal(mine, x) for mine, (x, _) in zip(second, expected, strict=True))


def test_the_room_does_not_load_transformers():
    code = "import sys, fsdp_ema_lib.lab.own_model; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
