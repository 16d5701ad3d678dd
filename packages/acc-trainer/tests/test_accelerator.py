"""The Accelerator as a script uses it, against plain torch loops."""

from __future__ import annotations

import copy
import gc
import json
import threading
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import acc_plugins
from acc_ops.testing import run_threads
from acc_plugins.options.accumulation import GradientAccumulationPlugin
from acc_plugins.options.compile import TorchDynamoPlugin
from acc_plugins.options.dataloader import DataLoaderConfiguration
from acc_plugins.options.kwargs import AutocastKwargs, GradScalerKwargs, ProfileKwargs
from acc_plugins.options.project import ProjectConfiguration
from acc_trainer import Accelerator
from acc_trainer.state import is_initialized

torch.set_num_threads(1)


DRAWING = threading.Lock()  # ranks that are threads share torch's generator


def net(seed=0, dtype=torch.float32):
    with DRAWING:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(dtype)


def data(size, dtype=torch.float32):
    torch.manual_seed(42)
    return TensorDataset(torch.randn(size, 3, dtype=dtype), torch.randn(size, 1, dtype=dtype))


def mse(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def plain_loop(samples, *, batch, accumulate=1, epochs=1, clip=None, shuffle=False, dtype=torch.float32):
    model = net(dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(9)
    loader = DataLoader(samples, batch, shuffle=shuffle)
    for _ in range(epochs):
        for index, one in enumerate(loader):
            (mse(model, one) / accumulate).backward()
            if (index + 1) % accumulate == 0 or index + 1 == len(loader):
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def prepared_loop(
    samples, *, batch, accumulate=1, epochs=1, clip=None, shuffle=False, dtype=torch.float32, **options
):
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, **options)
    model = net(dtype=dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    torch.manual_seed(9)
    loader = accelerator.prepare(DataLoader(samples, batch, shuffle=shuffle))
    for _ in range(epochs):
        for one in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse(model, one))
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_one_process_trains_bit_for_bit_as_a_plain_loop(accumulate, clip, shuffle):
    settings = {"batch": 2, "accumulate": accumulate, "epochs": 2, "clip": clip, "shuffle": shuffle}
    plain, ours = plain_loop(data(14), **settings), prepared_loop(data(14), **settings)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("dispatch", [False, True])
def test_ranks_train_as_one_process_on_the_joined_batches(ranks, accumulate, dispatch):
    samples = data(12 * ranks, torch.float64)
    settings = {"accumulate": accumulate, "epochs": 2, "clip": 0.5, "dtype": torch.float64}
    plain = plain_loop(samples, batch=2 * ranks, **settings)

    def work():
        return prepared_loop(
            samples, batch=2, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch), **settings
        )

    for ours in run_threads(ranks, work):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(plain, ours, strict=True))


def test_prepare_keeps_the_order_and_hands_back_what_is_not_its_own():
    accelerator = Accelerator()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(range(4))
    marker = object()
    made = accelerator.prepare(scheduler, loader, marker, optimizer, model)
    assert made[0].scheduler is scheduler
    assert made[1].dataset is loader.dataset
    assert made[2] is marker
    assert made[3].optimizer is optimizer
    assert made[4] is model
    assert accelerator.prepare(*made) == made
    assert accelerator.prepare(model) is model
    assert len(accelerator._models) == 1


def test_device_placement_is_checked_and_followed():
    accelerator = Accelerator()
    with pytest.raises(ValueError, match="each of the 1 objects, got 2"):
        accelerator.prepare(net(), device_placement=[True, False])
    with pytest.raises(ValueError, match="a list with one entry per object"):
        accelerator.prepare(net(), device_placement="yes")
    staying = net().to("meta")
    assert accelerator.prepare(net(), staying, device_placement=[True, False])[1] is staying
    loader = accelerator.prepare_data_loader(DataLoader(range(2)), device_placement=False)
    assert loader.device is None


@pytest.mark.parametrize(
    ("argument", "make", "engine"),
    [
        ("deepspeed_plugin", acc_plugins.DeepSpeedPlugin, "DeepSpeed"),
        ("deepspeed_plugins", lambda: {"a": acc_plugins.DeepSpeedPlugin()}, "DeepSpeed"),
        ("megatron_lm_plugin", acc_plugins.MegatronLMPlugin, "Megatron-LM"),
    ],
)
def test_a_built_plugin_of_an_engine_that_is_not_built_names_the_engine(argument, make, engine):
    with pytest.raises(
        ValueError, match=rf"{argument} was given .*: {engine} is not built yet, leave it out"
    ):
        Accelerator(**{argument: make()})
    assert not is_initialized()


def test_unbuilt_engines_are_refused_by_name():
    with pytest.raises(ValueError, match=r"deepspeed_plugin was given .* not built yet"):
        Accelerator(deepspeed_plugin=object())
    with pytest.raises(ValueError, match="megatron_lm_plugin"):
        Accelerator(megatron_lm_plugin=object())


def test_contradicting_options_are_refused():
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps \(here 2\) or"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin())
    with pytest.raises(ValueError, match="dynamo_backend or dynamo_plugin"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())
    with pytest.raises(ValueError, match="only one AutocastKwargs"):
        Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()])
    with pytest.raises(TypeError, match="KwargsHandler objects, got 3"):
        Accelerator(kwargs_handlers=[3])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Accelerator(gradient_accumulation_steps=0)
    with pytest.raises(TypeError, match="must be a DataLoaderConfiguration"):
        Accelerator(dataloader_config={"split_batches": True})
    with pytest.raises(TypeError, match="must be a ProjectConfiguration"):
        Accelerator(project_config="runs")


def test_the_environment_decides_the_accumulation(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "6")
    assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 6


def test_options_show_where_scripts_look():
    accelerator = Accelerator(split_batches=True, project_dir="runs", kwargs_handlers=[GradScalerKwargs()])
    assert accelerator.split_batches
    assert (accelerator.project_dir, accelerator.logging_dir) == ("runs", "runs")
    assert accelerator.scaler_handler == GradScalerKwargs()
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (
        1,
        0,
        0,
    )
    assert accelerator.is_main_process
    assert not accelerator.multi_device
    assert accelerator.rng_types == ["generator"]
    accelerator.even_batches = False
    accelerator.gradient_accumulation_steps = 3
    accelerator.sync_gradients = False
    assert (accelerator.dataloader_config.even_batches, accelerator.grad_sync.num_steps) == (False, 3)
    assert not accelerator.gradient_state.sync_gradients
    assert copy.deepcopy(accelerator) is accelerator
    assert accelerator.mixed_precision == "no"
    assert accelerator.should_save_model


def test_what_is_not_in_use_shows_its_default():
    accelerator = Accelerator()
    assert accelerator.fp8_backend.value == "NO"
    handlers = (
        "fp8_recipe",
        "ao_recipe",
        "te_recipe",
        "msamp_recipe",
        "autocast",
        "ddp",
        "init",
        "profile",
        "scaler",
    )
    assert all(getattr(accelerator, f"{name}_handler") is None for name in handlers)
    flags = ("fp8_enabled", "has_fp8_handler", "delayed_fp8_autocast", "native_amp", "has_lomo_optimizer")
    assert not any(getattr(accelerator, name) for name in flags)
    assert not accelerator.is_composable_parallelism_enabled
    assert (accelerator.scaler, accelerator.flag_tensor, accelerator.parallelism_config) == (None, None, None)
    assert not hasattr(accelerator, "deepspeed_engine_wrapped")


def test_an_evaluation_left_early_does_not_spoil_the_accumulation():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train, evaluation = accelerator.prepare(
        model, optimizer, DataLoader(torch.ones(5, 1)), DataLoader(torch.ones(6, 1))
    )
    updates = []
    for index, batch in enumerate(train):
        with accelerator.accumulate(model):
            before = model.weight.item()
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        if model.weight.item() != before:
            updates.append(index + 1)
        if index == 1:
            for _ in evaluation:
                break
    assert updates == [2, 4, 5]


def test_a_step_after_a_broken_window_is_a_step():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(8, 1)))
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        if index == 1:
            break
    accelerator.free_memory(model, optimizer, loader)
    fresh = torch.nn.Linear(1, 1)
    fresh, own = accelerator.prepare(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1))
    before = fresh.weight.item()
    accelerator.backward(fresh(torch.ones(1, 1)).sum())
    own.step()
    assert fresh.weight.item() != before


def test_a_broken_window_is_not_carried_into_the_next_loop():
    def weights(broken):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(6), 2))
        for stop in (0, None) if broken else (None,):
            for index, batch in enumerate(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(mse(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
                if index == stop:
                    break
        return model[0].weight

    assert torch.equal(weights(True), weights(False))


def test_two_models_and_optimizers_under_one_accumulate():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    one, two = net(0), net(1)
    one, two, first, second = accelerator.prepare(
        one, two, torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
    )
    moved = []
    for _ in range(2):
        before = [one[0].weight.detach().clone(), two[0].weight.detach().clone()]
        with accelerator.accumulate(one, two):
            accelerator.backward((one(torch.ones(1, 3)) + two(torch.ones(1, 3))).sum())
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        moved.append([not torch.equal(a, b[0].weight) for a, b in zip(before, (one, two), strict=True)])
    assert moved == [[False, False], [True, True]]


def test_a_second_accelerator_changes_nothing_of_the_first():
    first = Accelerator(gradient_accumulation_steps=3)
    second = Accelerator()
    loader = second.prepare(DataLoader(range(2)))
    for _ in loader:
        with first.accumulate():
            pass
    assert not first.sync_gradients
    assert first.step == 2


def test_no_sync_keeps_gradients_on_the_rank():
    def work():
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
        rank = accelerator.process_index
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.full((1, 1), float(rank))).sum())
        held = accelerator.unwrap_model(model).weight.grad.item()
        with accelerator.no_sync(model):
            loss = model(torch.full((1, 1), float(rank))).sum()
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
        return held, accelerator.unwrap_model(model).weight.grad.item()

    assert run_threads(2, work) == [(0.0, 1.0), (1.0, 1.0)]


def test_gradients_are_clipped_at_their_true_size_in_fp16():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 2.0).item() == pytest.approx(4.0)
    assert model.weight.grad.item() == pytest.approx(2.0, rel=1e-5)
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    assert model.weight.grad.item() == pytest.approx(0.5)
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.95)
    optimizer.zero_grad()
    accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
    accelerator.unscale_gradients(optimizer)
    assert model.weight.grad.item() == pytest.approx(4.0)


def test_bf16_computes_low_and_gives_back_floats():
    accelerator = Accelerator(mixed_precision="bf16")
    own = net()
    before = own.forward
    model = accelerator.prepare(own)
    seen = []
    own[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    assert model(torch.ones(1, 3)).dtype is torch.float32
    assert seen == [torch.bfloat16]
    with accelerator.autocast():
        assert torch.nn.Linear(1, 1)(torch.ones(1, 1)).dtype is torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert torch.nn.Linear(1, 1)(torch.ones(1, 1)).dtype is torch.float32
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert plain is own
    assert plain.forward == before
    plain(torch.ones(1, 3))
    assert seen[1] is torch.float32


def test_free_memory_frees_the_model_at_once():
    accelerator = Accelerator(mixed_precision="bf16")
    model = net()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(4), 2)
    )
    for batch in loader:
        accelerator.backward(mse(model, batch))
        optimizer.step()
    gone = [weakref.ref(accelerator.unwrap_model(model)), weakref.ref(optimizer), weakref.ref(loader)]
    del batch
    gc.collect()
    gc.disable()
    try:
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
        assert [one() for one in gone] == [None, None, None]
        assert (model, optimizer, loader) == (None, None, None)
    finally:
        gc.enable()
    assert accelerator.clear(1) == [None]


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    def make():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return accelerator, accelerator.prepare(
            model,
            optimizer,
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
            DataLoader(data(20), 2, shuffle=True),
        )

    def epoch(accelerator, model, optimizer, scheduler, loader, save_at=None):
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(mse(model, batch) * (1 + torch.rand(())))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if index == save_at:
                accelerator.save_state(str(tmp_path / "checkpoint"))

    def uninterrupted():
        torch.manual_seed(3)
        accelerator, made = make()
        torch.manual_seed(4)
        for save_at in (None, 3, None):
            epoch(accelerator, *made, save_at=save_at)
        return [p.detach().clone() for p in made[0].parameters()]

    def resumed():
        torch.manual_seed(99)
        accelerator, made = make()
        accelerator.load_state(str(tmp_path / "checkpoint"))
        assert accelerator.step == 14
        rest = accelerator.skip_first_batches(made[3], 4)
        epoch(accelerator, made[0], made[1], made[2], rest)
        epoch(accelerator, *made)
        return [p.detach().clone() for p in made[0].parameters()]

    wanted = uninterrupted()
    assert all(torch.equal(a, b) for a, b in zip(wanted, resumed(), strict=True))


def test_loaders_stand_where_they_stood_on_every_rank(tmp_path):
    def flat(loader):
        return [int(x) for batch in loader for x in batch]

    def before():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(list(range(16)), 2, shuffle=True))
        first = flat(loader)
        accelerator.save_state(str(tmp_path / "checkpoint"))
        return first, flat(loader)

    saved = run_threads(2, before)

    def after():
        accelerator = Accelerator()
        torch.manual_seed(55)
        loader = accelerator.prepare(DataLoader(list(range(16)), 2, shuffle=True))
        accelerator.load_state(str(tmp_path / "checkpoint"))
        return flat(loader)

    assert run_threads(2, after) == [following for _, following in saved]
    assert saved[0][0] != saved[0][1]


def test_a_profile_is_written_for_each_rank(tmp_path):
    accelerator = Accelerator(
        kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))]
    )
    with accelerator.profile() as profiler:
        torch.ones(4).sum()
    assert any("sum" in event.key for event in profiler.key_averages())
    assert json.loads((tmp_path / "profile_0.json").read_text())["traceEvents"]


def test_models_are_compiled_when_asked():
    accelerator = Accelerator(dynamo_backend="eager")
    own = net()
    model = accelerator.prepare(own)
    assert model is not own
    assert torch.allclose(model(torch.ones(1, 3)), own(torch.ones(1, 3)))
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is own
    assert accelerator.get_state_dict(model).keys() == own.state_dict().keys()
    assert accelerator.prepare(own) is model


def test_a_model_spread_by_a_device_map_is_refused_on_several_processes(monkeypatch):
    def work():
        accelerator = Accelerator()
        model = net()
        model.hf_device_map = {"0": "cpu", "2": "disk"}
        assert accelerator.verify_device_map(model)
        with pytest.raises(ValueError, match="spread over several devices"):
            accelerator.prepare(model)
        return True

    assert run_threads(2, work) == [True, True]


def test_evaluation_models_are_not_wrapped_for_training():
    def work():
        accelerator = Accelerator()
        own = net()
        return accelerator.prepare_model(own, evaluation_mode=True) is own

    assert run_threads(2, work) == [True, True]


def test_the_run_is_told_about_through_the_project(tmp_path):
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=config)
    accelerator.prepare(net())
    for _ in range(2):
        accelerator.save_state()
    assert accelerator.save_iteration == 2
    assert sorted(one.name for one in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint_0",
        "checkpoint_1",
    ]
    accelerator.end_training()
    assert accelerator.is_main_process
