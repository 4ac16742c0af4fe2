"""The optimizers by their names: built, decayed, and without the package."""

import pytest
import torch
from torch import nn

from smalti import CheckpointError, OptimizerEntry, UserError
from smalti.builtin.core import OPTIMIZERS as CORE
from smalti.config import resolve
from smalti.hookspecs import HookSpecs
from smalti.plugins import Selection, load_plugins, schema_of
from smalti.plugins.lookup import check_strategy, choose_distributed
from smalti.training import build_registered, matrices, parameter_groups
from smalti_optimizers.checks import SCHEDULE_FREE
from smalti_optimizers.plugin import plugin

OPTIMIZERS = plugin.register_optimizers()
EVERYONE = [*OPTIMIZERS, *CORE]
DECAYING = [entry for entry in OPTIMIZERS if "weight_decay" in entry.accepts and entry.name not in SCHEDULE_FREE]


def config(*flags: str):
    return resolve(schema_of(load_plugins()), flags, environment={})


@pytest.mark.parametrize("entry", OPTIMIZERS, ids=lambda entry: entry.name)
def test_every_optimizer_lowers_a_loss(entry: OptimizerEntry):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    settings = config(f"--optimizer={entry.name}", "--learning_rate=0.01")
    optimizer = build_registered(parameter_groups(net, 0.01, matrices(net)), settings, OPTIMIZERS)
    inputs, target = torch.randn(32, 8), torch.randn(32, 4)
    losses = []
    for _ in range(30):
        loss = (net(inputs) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("entry", DECAYING, ids=lambda entry: entry.name)
def test_weights_without_a_gradient_shrink_by_the_rate_times_the_decay(entry: OptimizerEntry):
    weight = nn.Parameter(torch.ones(2, 2))
    groups = [{"params": [("weight", weight)], "weight_decay": 1.0}]
    optimizer = build_registered(groups, config(f"--optimizer={entry.name}", "--learning_rate=1e-3"), OPTIMIZERS)
    for _ in range(2):
        weight.grad = torch.zeros(2, 2)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 0.999**2), rtol=1e-6, atol=0)


def test_adafactor_trains_the_zeros_that_an_adapter_begins_with():
    """By about the rate in each step; with the rate scaled by the size of the weight, by a thousandth of it."""
    rate, steps, sizes = 1e-4, 100, []
    for name in ("adafactor", "adafactor_scaled"):
        weight, random = nn.Parameter(torch.zeros(16, 4)), torch.Generator().manual_seed(0)
        groups = [{"params": [("lora_B", weight)], "weight_decay": 0.0}]
        optimizer = build_registered(groups, config(f"--optimizer={name}", f"--learning_rate={rate}"), EVERYONE)
        for _ in range(steps):
            weight.grad = 1 + 0.1 * torch.randn(16, 4, generator=random)
            optimizer.step()
        sizes.append(weight.detach().square().mean().sqrt().item() / (rate * steps))
    assert 1 / 3 < sizes[0] < 3
    assert sizes[1] < 0.01


def test_moments_of_torchs_adafactor_are_not_continued_with_other_steps():
    net = nn.Linear(4, 2)
    fixed, scaled = (
        build_registered(parameter_groups(net, 0.0, matrices(net)), config(f"--optimizer={name}"), EVERYONE)
        for name in ("adafactor", "adafactor_scaled")
    )
    with pytest.raises(CheckpointError, match="scaled the learning rate") as caught:
        fixed.check_saved("Adafactor")
    assert "--optimizer=adafactor_scaled" in caught.value.fix
    fixed.check_saved(type(fixed).__name__)
    assert not hasattr(scaled, "check_saved")


def test_muon_steps_matrices_and_leaves_vectors_to_adamw():
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = build_registered(parameter_groups(net, 0.0, matrices(net)), config("--optimizer=muon"), OPTIMIZERS)
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    moments = {name: set(optimizer.state[parameter]) for name, parameter in net.named_parameters()}
    assert moments["0.weight"] == {"momentum_buffer"}
    assert moments["0.bias"] == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("name", "advice"), [("lion", "plugins/optimizers"), ("optimi-lion", "plugins/migrate")])
def test_an_older_configuration_names_the_package_where_it_is_absent(name, advice, tmp_path, monkeypatch):
    monkeypatch.setattr("smalti.config.known_packages.installed", lambda name: False)
    (tmp_path / "config.toml").write_text(f'optimizer = "{name}"\n')
    for present in (True, False):
        plugins = load_plugins(Selection(without=() if present else ("all",)))
        given = resolve(schema_of(plugins), (), file=tmp_path / "config.toml", environment={})
        if present:
            check_strategy(choose_distributed(given, plugins), given, plugins)
            continue
        with pytest.raises(UserError, match=f"Unknown optimizer '{name}'") as caught:
            check_strategy(choose_distributed(given, plugins), given, plugins)
        assert advice in (caught.value.fix or "")


def test_defaults_of_an_optimizer_are_found_however_its_name_is_written():
    given = config("--optimizer=optimizers:Prodigy-ScheduleFree")
    assert (given.value("learning_rate"), given.value("adam_beta2")) == (1.0, 0.99)


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        (("--optimizer=SGD", "--adam_beta1=0.5", "--adam_weight_decay=0.1"), ["adam_beta1"]),
        (("--optimizer=lion", "--adam_beta1=0.5", "--adam_epsilon=1e-6"), ["adam_epsilon"]),
        (("--optimizer=adafactor", "--adam_beta1=0.5", "--adam_weight_decay=0.1"), ["adam_beta1"]),
        (("--optimizer=prodigy", "--adam_weight_decay=0.1"), ["adam_weight_decay"]),
        (("--optimizer=adamw", "--adam_beta1=0.5", "--adam_epsilon=1e-6"), []),
        (("--optimizer=stableadamw",), []),
    ],
    ids=str,
)
def test_settings_that_an_optimizer_does_not_take_get_a_notice(flags, idle):
    notices = plugin.notices_before_launch(config(*flags))
    assert [notice.partition(" ")[0] for notice in notices] == idle


def test_the_settings_of_all_optimizers_are_known():
    """Also of those of the core, which this package does not register."""
    entries = load_plugins().gather(HookSpecs.register_optimizers)
    registered = {entry.name: entry.accepts for entry in entries if entry.origin.plugin in ("core", "optimizers")}
    some = {name: accepts for name, accepts in registered.items() if set(accepts) != {"betas", "eps", "weight_decay"}}
    assert {name: sorted(accepts) for name, accepts in plugin.settings().items() if name in some} == {
        name: sorted(accepts) for name, accepts in some.items()
    }


@pytest.mark.parametrize("name", [*SCHEDULE_FREE, "optimizers:AdamW-ScheduleFree"])
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--lr_scheduler=cosine", "averages the weights instead of lowering the learning rate, and lr_scheduler=cosine lowers"),
        ("--use_ema", "an average of the weights already, and use_ema would average them again"),
        ("--adam_beta1=0", "needs the average of the weights"),
    ],
)
def test_what_a_schedule_free_optimizer_does_not_need_is_refused(name, flag, message):
    [problem] = plugin.check_config(config(f"--optimizer={name}", flag))
    assert (message in problem.message, problem.where) == (True, f"flag ({flag.partition('=')[0]})")
    assert (
        plugin.check_config(config(f"--optimizer={name}", "--lr_scheduler=constant_with_warmup", "--lr_warmup_steps=9")) == []
    )
    assert plugin.check_config(config("--optimizer=adamw", flag)) == []
