"""An adapter beside quantised weights, on a tiny Flux: it trains, memory shrinks, and what cannot work is refused."""

import copy
import shutil
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import tiny
import torch
from adapters import make_adapter
from click.testing import CliRunner
from safetensors import safe_open
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smalti import ConfigError, FrozenStorage, RankInfo, UserError, World
from smalti.checkpoint.conversion.formats import OwnCheckpoint
from smalti.config.resolution import resolve
from smalti.launch.checks import check_sharding
from smalti.models.weights import materialise, without_weights
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import choose_distributed, find_family
from smalti.plugins.schema import check, schema_of
from smalti_diffusers.lora.assistant import ASSISTANT
from smalti_diffusers.lora.quantisation import QuantisedLinear, _restored as restored, check_device, quantise, storage
from smalti_diffusers.lora.strength import adapter_scaled
from smalti_export.command import export as export_command
from smalti_export.folder import TrainedWeights
from smalti_plan.out_of_memory import memory_use
from smalti_testing.family_subject import CAPTIONS, FamilySubject

pytest.importorskip("torchao")  # optional: only where it is installed

INT8 = "--base_model_precision=int8-torchao"
LORA = {
    "model_family": "flux",
    "model_type": "lora",
    "lora_rank": 4,
    "base_model_precision": "int8-torchao",
    "learning_rate": 5e-2,
    "checkpoint_step_interval": 1,
}
SEVERAL = {"num_processes": 2, "train_batch_size": 2, "validation_step_interval": 0, "allow_dataset_oversubscription": True}
ERRORS = {"int8-torchao": 0.01, "fp8-torchao": 0.05, "nf4-torchao": 0.2}
"""What each may be off at most, as a share of what an unquantised layer says."""


def test_importing_torchao_warns_of_nothing_that_a_user_could_change():
    code = "import smalti_diffusers, diffusers.quantizers.torchao, torchao.quantization"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [line for line in done.stderr.splitlines() if "torchao" in line or "_pytree" in line]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.flux(tmp_path_factory.mktemp("quantised") / "base")


@pytest.fixture(scope="module")
def run(base, train):
    """Two steps in one process, with pictures at their end."""
    code, output = train(base.parent / "one", **LORA, pretrained_model_name_or_path=base)
    assert code == 0, output
    return base.parent / "one"


def configured(base, *flags):
    plugins = load_plugins()
    words = ["--model_family=flux", f"--pretrained_model_name_or_path={base}", "--mixed_precision=no", "--use_cpu", *flags]
    return resolve(schema_of(plugins), words, environment={}), plugins


def family(base, *flags):
    return find_family(*configured(base, "--model_type=lora", "--lora_rank=2", *flags))


def materialised(made):
    with without_weights():
        model = made.build_model()
    return materialise(model, made.weights(1), "cpu")


def predict(made, model):
    subject = FamilySubject(made)
    noisy = torch.randn(subject.latents.shape, generator=torch.Generator().manual_seed(0))
    return subject.predict(model, noisy, [100.0, 500.0, 900.0], CAPTIONS)


def size(model) -> int:
    """Bytes of all weights, quantised ones as they are stored."""
    stored = list(model.parameters())
    for weight in (layer.weight for layer in model.modules() if isinstance(layer, QuantisedLinear)):
        stored += [part for name in weight.__tensor_flatten__()[0] if (part := getattr(weight, name)) is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in stored)


def off(one, other) -> float:
    return float((one - other).detach().norm() / other.detach().norm())


def adapter_of(directory) -> dict[str, bytes]:
    trained = TrainedWeights(OwnCheckpoint(directory / "checkpoints" / "step-00000002"), use_ema=False, precision="fp32")
    return {name: bytes(trained.read(name)) for name in trained.tensors}


def decoded(tensors):
    return torch.cat([torch.frombuffer(bytearray(value), dtype=torch.float32) for value in tensors.values()])


@pytest.mark.parametrize("precision", ERRORS)
def test_a_quantised_layer_says_nearly_what_it_said_and_gives_back_nearly_the_same_gradient(precision):
    torch.manual_seed(0)
    plain = nn.Linear(128, 256).requires_grad_(False)
    layer = QuantisedLinear(copy.deepcopy(plain), precision)
    layer.weights_loaded()
    inputs = torch.randn(2, 64, 128, requires_grad=True)
    said = [each(inputs) for each in (layer, plain)]
    gradients = [torch.autograd.grad(each.square().sum(), inputs)[0] for each in said]
    assert 0 < off(*said) < ERRORS[precision]
    assert 0 < off(*gradients) < 2 * ERRORS[precision]
    assert layer.quantised
    assert list(layer.state_dict()) == ["bias"]


def test_under_autocast_a_quantised_layer_computes_in_the_type_of_the_run():
    layer = QuantisedLinear(nn.Linear(16, 16).bfloat16().requires_grad_(False), "int8-torchao")
    layer.weights_loaded()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 16)).dtype == torch.bfloat16


def test_quantised_weights_take_less_memory_and_change_little(base):
    plain, quantised = family(base), family(base, INT8)
    before, after = materialised(plain), materialised(quantised)
    assert size(after) < 0.6 * size(before)
    assert 0 < off(predict(quantised, after), predict(plain, before)) < 0.02


def test_only_frozen_linear_layers_inside_blocks_are_quantised(base):
    model = materialised(family(base, INT8))
    names = {name for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}
    assert "transformer_blocks.0.attn.to_q.base_layer" in names
    assert all(name.startswith(("transformer_blocks.", "single_transformer_blocks.")) and "lora" not in name for name in names)
    assert {parameter.requires_grad for name, parameter in model.named_parameters() if ".lora_" in name} == {True}


def test_an_adapter_beside_quantised_weights_learns(base):
    made = family(base, INT8)
    model = materialised(made)
    target = torch.zeros_like(predict(made, model)).detach()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-2)
    losses = []
    for _ in range(6):
        loss = (predict(made, model) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_an_assistant_beside_quantised_weights_is_not_quantised_and_has_its_effect(base, tmp_path):
    file = make_adapter(tmp_path, "flux", base=base).export(tmp_path / "style", format="kohya")
    plain, assisted = family(base, INT8), family(base, INT8, f"--assistant_lora={file}")
    model = materialised(assisted)
    assert not any(".lora_" in name for name, module in model.named_modules() if isinstance(module, QuantisedLinear))
    before, after = predict(plain, materialised(plain)), predict(assisted, model)
    assert off(after, before) > 0.1
    with adapter_scaled(model, 0, ASSISTANT):
        assert torch.equal(predict(assisted, model), before)


def test_an_interrupted_run_on_quantised_weights_goes_on_bit_for_bit(run, base, train, tmp_path):
    shutil.copytree(run / "checkpoints" / "step-00000001", tmp_path / "run" / "checkpoints" / "step-00000001")
    options = LORA | {"pretrained_model_name_or_path": base, "validation_step_interval": 0}
    code, output = train(tmp_path / "run", **options)
    assert (code, "at step 1" in output) == (0, True), output
    assert adapter_of(tmp_path / "run") == adapter_of(run)


def test_replicas_train_the_same_adapter_beside_quantised_weights(run, base, train, tmp_path):
    code, output = train(tmp_path / "run", **LORA | SEVERAL, pretrained_model_name_or_path=base)
    assert code == 0, output
    assert off(decoded(adapter_of(tmp_path / "run")), decoded(adapter_of(run))) < 1e-3


def test_the_exported_adapter_knows_nothing_of_quantised_weights(run, tmp_path):
    done = CliRunner().invoke(export_command, [str(run), "--to", str(tmp_path / "adapter")])
    assert done.exit_code == 0, done.output
    with safe_open(tmp_path / "adapter" / "pytorch_lora_weights.safetensors", framework="pt") as file:
        assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in file.keys())  # noqa: SIM118


def test_an_adapter_tells_beside_what_it_was_trained(base):
    plain, quantised = family(base).adapter(1), family(base, INT8).adapter(1)
    assert quantised == {**plain, "base_precision": "int8-torchao"}


REFUSED = {
    "beside them only an adapter can be trained": (INT8, "--model_type=full"),
    "cannot trace": ("--base_model_precision=nf4-torchao", "--model_type=lora", "--dynamo_backend=inductor"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_quantised_weights_cannot_do_is_refused_before_launch(base, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        check(*configured(base, *REFUSED[reason]))
    assert refused.value.exit_code == 2


def test_without_torchao_one_is_told_to_install_it(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)  # as Python itself marks what cannot be imported
    with pytest.raises(ConfigError, match="pip install 'torchao"):
        check(*configured(base, INT8, "--model_type=lora"))


def test_quantised_weights_are_not_shared_out(base):
    made = family(base, INT8)
    plan = choose_distributed(*configured(base, INT8, "--model_type=lora", "--fsdp_enable", "--num_processes=2"))
    with pytest.raises(UserError, match="cannot shard weights in int8-torchao"):
        check_sharding(plan, made)


def test_a_model_without_a_layer_that_fits_is_refused(base):
    with pytest.raises(UserError, match="no layer of the model can be kept in nf4-torchao"):
        family(base, "--base_model_precision=nf4-torchao").build_model()


def test_devices_without_fp8_refuse_it():
    with pytest.raises(UserError, match="MPS"):
        check_device("fp8-torchao", "mps")


class Restoring(TorchDispatchMode):
    """The most bytes that results of operations take at one moment, but for those that share the memory of `given`."""

    def __init__(self, given) -> None:
        super().__init__()
        self.most, self._given, self._live = 0, given, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in (each.untyped_storage() for each in tree_leaves(result) if type(each) is torch.Tensor):
            if made.data_ptr() not in self._given and made._cdata not in self._live:
                self._live[made._cdata] = made.nbytes()
                weakref.finalize(made, self._live.pop, made._cdata, None)
        self.most = max(self.most, sum(self._live.values()))
        return result


def parts(weight):
    """The tensors that a quantised weight consists of."""
    names = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else ()
    return [part for name in names if (part := getattr(weight, name)) is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("precision", ERRORS)
def test_the_bytes_of_a_quantised_layer_are_known_before_it_is_quantised(precision, dtype):
    block = nn.Sequential(nn.Linear(256, 1024, bias=False, dtype=dtype)).requires_grad_(False)
    model = quantise(nn.ModuleList([block]), ["Sequential"], precision)
    [before] = storage(model, ["Sequential"], precision, FrozenStorage(bytes=model[0][0].weight.nbytes))
    model[0][0].weights_loaded()
    weight = model[0][0].weight
    held = sum(part.nbytes for part in parts(weight))
    [after] = storage(model, ["Sequential"], precision, FrozenStorage(bytes=0))
    with Restoring({part.untyped_storage().data_ptr() for part in parts(weight)}) as restoring:
        restored(weight)
    assert (before, before.bytes) == (after, held)
    assert before.restoring == pytest.approx(restoring.most, rel=0.02)


@pytest.mark.parametrize("precision", ["int8-torchao", "fp8-torchao"])
def test_the_frozen_weights_of_a_model_are_counted_as_they_are_stored(base, precision):
    made = family(base, f"--base_model_precision={precision}")
    with without_weights():
        unloaded = made.build_model()
    loaded = materialised(made)
    trained = sum(each.nbytes for each in loaded.parameters() if each.requires_grad)
    counted = [made.frozen_storage(model)[0].bytes for model in (unloaded, loaded)]
    assert counted == [size(loaded) - trained] * 2


def test_an_error_of_memory_counts_quantised_weights_as_frozen_ones(base):
    (config, _), made = configured(base, "--model_type=lora", "--lora_rank=2", INT8), family(base, INT8)
    model = materialised(made)
    trained = [each for each in model.parameters() if each.requires_grad]
    parallel = SimpleNamespace(unwrap=lambda model: model, local_communicator=lambda: None)
    run = SimpleNamespace(parallel=parallel, model=model, optimizer=torch.optim.AdamW(trained), ema=None, family=made)
    info = RankInfo(id="", directory=base, world=World(), config=config, strategy="one process", plugins=())
    use = memory_use(MemoryError(), info, run)
    assert use.frozen == size(model) - sum(each.nbytes for each in trained)
