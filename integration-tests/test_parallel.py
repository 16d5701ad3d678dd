"""Tensor, context and sequence parallelism on real gloo processes: the numbers of one process that has everything, in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acc_ops.testing import run_processes
from acc_ops.world import current_world

_VOCABULARY, _WIDTH, _HEADS, _KV_HEADS, _SIZE, _TIME = 16, 16, 4, 2, 4, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = _SIZE
        self.q = nn.Linear(_WIDTH, _HEADS * _SIZE)
        self.k = nn.Linear(_WIDTH, _KV_HEADS * _SIZE)
        self.v = nn.Linear(_WIDTH, _KV_HEADS * _SIZE, bias=False)
        self.norm = nn.RMSNorm(_SIZE)
        self.out = nn.Linear(_HEADS * _SIZE, _WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        q = self.norm(self.q(x).view(shape)).transpose(1, 2)
        k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(_WIDTH, 32), nn.Linear(32, _WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Tied embedding and head, learned places, grouped queries, a norm over single heads."""

    tp_plan = {  # noqa: RUF012 - as transformers' models carry it
        "tokens": "embedding_rowwise",
        "blocks.*.attention.q": "colwise",
        "blocks.*.attention.k": "colwise",
        "blocks.*.attention.v": "colwise",
        "blocks.*.attention.norm": "replicated_with_grad_allreduce",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH, padding_idx=0)
        self.places = nn.Embedding(_TIME, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.recompute = recompute

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return self.head(self.norm(x))


def _model(seed: int = 0, **options: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(**options).double()


def _batch(step: int, share: int = 0, shares: int = 1) -> dict[str, Tensor]:
    """Samples and targets, of which some do not count, unequally many in the two halves of the sequences."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, _VOCABULARY, (4, _TIME), generator=generator)
    targets = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    targets[:, -1] = -100
    targets[:, 5] = -100
    each = 4 // shares
    mine = slice(share * each, (share + 1) * each)
    return {"ids": ids[mine].clone(), "targets": targets[mine].clone()}


def _loss(model: nn.Module, ids: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.cross_entropy(model(ids, mask=mask).flatten(0, 1), targets.flatten())


_MASK = torch.ones(_TIME, _TIME, dtype=torch.bool).tril()
_MASK[3, 1] = _MASK[7, 2] = False


def _reference(
    steps: int = 10, mask: Tensor | None = None
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the first gradients and the last weights of one process with all samples."""
    model, losses, gradients = _model(), [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        batch = _batch(step)
        loss = _loss(model, batch["ids"], batch["targets"], mask)
        loss.backward()
        gradients = gradients or {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {n: p.detach() for n, p in model.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


def _run_all(checks: list[Callable[[], None]]) -> None:
    for check in checks:
        check()


def _free_config(**sizes: int) -> Any:
    """A ParallelismConfig that allows copies beside split layers without shards, as MeshStrategy does."""
    from acc_plugins import ParallelismConfig

    class Free(ParallelismConfig):
        def _check_together(self) -> None:
            pass

    return Free(**sizes)


def _loss_under_context(
    strategy: Any, model: nn.Module, mesh: Any, batch: dict[str, Tensor], mask: Any
) -> Tensor:
    """Places and masks by hand, as a model of one's own needs them; half of the places are here."""
    from acc_plugins.parallel.context import split_sequences
    from acc_plugins.parallel.exchange import line_of
    from acc_plugins.parallel.split import reach_of

    line, here = line_of(mesh, "cp"), _TIME // mesh["cp"].size()
    places = torch.arange(_TIME)[None]
    rows = [] if mask is None else [mask.clone()]
    buffers, dims = [*batch.values(), places, *rows], [1, 1, 1, *([0] if rows else [])]
    reach = reach_of(strategy.unwrap(model))
    with split_sequences([reach], line, buffers, dims):
        assert batch["ids"].shape[1] == here
        logits = model(batch["ids"], places, *rows)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        strategy.backward(loss)
    assert batch["ids"].shape[1] == places.shape[1] == _TIME
    return loss


def _loss_under_heads(
    strategy: Any, model: nn.Module, mesh: Any, batch: dict[str, Tensor], mask: Any
) -> Tensor:
    """A loader that cuts, and a loss that is weighed by hand, as scripts for sequence parallelism do."""
    from acc_plugins.parallel.exchange import line_of
    from acc_plugins.parallel.sequence import SplitLoader
    from acc_plugins.parallel.split import reach_of

    line = line_of(mesh, "sp")
    labels = torch.cat((batch["ids"][:, :1], batch["targets"][:, :-1]), 1)
    loader = SplitLoader([{"input_ids": batch["ids"], "labels": labels}], line)
    loader.tell(reach_of(strategy.unwrap(model)))
    (cut,) = loader
    assert cut["input_ids"].shape[1] == _TIME // line.size
    logits = model(cut["input_ids"], cut["position_ids"], None if mask is None else mask)
    targets = cut["shift_labels"].flatten()
    total = line.mean((targets != -100).sum().double())
    loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / total
    strategy.backward(loss)
    return loss


def _loss_of_rows(strategy: Any, model: nn.Module, mesh: Any, batch: dict[str, Tensor], mask: Any) -> Tensor:
    loss = _loss(model, batch["ids"], batch["targets"], mask)
    strategy.backward(loss)
    return loss


def _trains_as_one_process(
    mask: Tensor | None = None, recompute: bool = False, late: bool = False, **sizes: int
) -> None:
    """Losses of ten steps, the first gradients, clipping and the last weights."""
    from acc_plugins.precisions.precision import Precision
    from acc_plugins.strategies.mesh import MeshStrategy
    from acc_plugins.strategies.strategy import Bundle

    config = _free_config(**sizes)
    mesh = config.build_device_mesh("cpu")
    world = current_world()
    strategy = MeshStrategy(world, Precision(), config, mesh=mesh)
    own = _model(seed=world.rank, recompute=recompute)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    if late:
        (model,) = strategy.prepare(Bundle(models=[own])).models
        strategy.prepare(Bundle(optimizers=[optimizer]))
    else:
        (model,) = strategy.prepare(Bundle(models=[own], optimizers=[optimizer])).models
    expected, expected_gradients, expected_weights = _reference(mask=mask)
    shares = config.dp_replicate_size
    share = mesh["dp_replicate"].get_local_rank() if shares > 1 else 0
    loss_of = (
        _loss_under_context
        if config.cp_enabled
        else _loss_under_heads
        if config.sp_enabled
        else _loss_of_rows
    )
    comm = strategy.averaging.comm
    for step, loss_of_one in enumerate(expected):
        loss = loss_of(strategy, model, mesh, _batch(step, share, shares), mask)
        told = comm.all_reduce(loss.detach().clone()) / comm.size
        assert told.item() == pytest.approx(loss_of_one, rel=1e-9), (step, sizes)
        if step == 0:
            _assert_same({n: _whole(p.grad) for n, p in own.named_parameters()}, expected_gradients)
        strategy.clip_norm(model.parameters(), 0.5)
        strategy.step(optimizer)
        optimizer.zero_grad()
    _assert_same({n: _whole(p.detach()) for n, p in own.named_parameters()}, expected_weights)
    assert own.head.weight is own.tokens.weight
    strategy.close()


def _layers_over_two() -> None:
    _trains_as_one_process(tp_size=2)
    _trains_as_one_process(tp_size=2, late=True, mask=_MASK)


def _sequences_over_two() -> None:
    _trains_as_one_process(cp_size=2)
    _trains_as_one_process(cp_size=2, mask=_MASK, recompute=True)


def _heads_over_two() -> None:
    _trains_as_one_process(sp_size=2)
    _trains_as_one_process(sp_size=2, mask=_MASK, recompute=True)


def _mixes_over_four() -> None:
    _trains_as_one_process(dp_replicate_size=2, tp_size=2)
    _trains_as_one_process(dp_replicate_size=2, cp_size=2)
    _trains_as_one_process(sp_size=4)  # fewer heads of keys than ranks
    _trains_as_one_process(cp_size=4, mask=_MASK)


def _accelerated(
    *, fsdp: bool = False, ignored: str | None = None, early: bool = False, **sizes: int
) -> None:
    """The same through an Accelerator: loaders that give ranks of one sample the same batch, metrics that count each sample once."""
    from torch.utils.data import DataLoader

    from acc_plugins import FullyShardedDataParallelPlugin, ParallelismConfig
    from acc_trainer import Accelerator

    config = ParallelismConfig(**sizes)
    plugin = (
        FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=None, ignored_modules=ignored)
        if fsdp
        else None
    )
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    ranks, shares = accelerator.num_processes, config.data_parallel_size
    mesh = accelerator.torch_device_mesh
    steps = 10
    samples = [
        {"ids": i, "targets": t} for n in range(steps) for i, t in zip(*_batch(n).values(), strict=True)
    ]
    for number, sample in enumerate(samples):
        sample["number"] = torch.tensor(number)
    loader = DataLoader(samples, batch_size=4 // shares)
    own = _model(seed=accelerator.process_index)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    if early:
        assert accelerator._prepare_cp(own, loader) == (own, loader)
    model, optimizer, loader = accelerator.prepare(own, optimizer, loader)
    names = [name for name, _ in own.named_parameters()]
    expected, expected_gradients, expected_weights = _reference(steps)
    seen: list[int] = []
    for step, batch in enumerate(loader):
        numbers = batch.pop("number")
        places = torch.arange(_TIME)[None].repeat(len(numbers), 1)
        if config.sp_enabled:
            loss = _loss_under_heads(_Backward(accelerator), model, mesh, batch, None)
        else:
            buffers = [*batch.values(), places] if config.cp_enabled else None
            with accelerator.maybe_context_parallel(buffers, [1] * 3 if buffers else None):
                logits = model(batch["ids"], places)
                loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
                accelerator.backward(loss)
        assert accelerator.reduce(loss.detach(), "mean").item() == pytest.approx(expected[step], rel=1e-9)
        if step == 0:
            gradients = {n: _whole(p.grad) for n, p in zip(names, model.parameters(), strict=True)}
            _assert_same(gradients, expected_gradients)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(numbers).tolist()
        told = accelerator.gather_for_metrics([str(number) for number in numbers.tolist()])
        assert sorted(map(int, told)) == sorted(seen[-4:]), (told, ranks)
    assert sorted(seen) == list(range(4 * steps))
    weights = {n: _whole(p.detach()) for n, p in zip(names, model.parameters(), strict=True)}
    _assert_same(weights, expected_weights)
    accelerator.end_training()


class _Backward:
    """What the loss functions above ask of a strategy, of an Accelerator."""

    def __init__(self, accelerator: Any) -> None:
        self.backward, self.unwrap = accelerator.backward, accelerator.unwrap_model


def _by_accelerators_over_two() -> None:
    _accelerated(tp_size=2)
    _accelerated(cp_size=2)
    _accelerated(sp_size=2)
    _accelerated(cp_size=2, fsdp=True)
    _accelerated(sp_size=2, fsdp=True)


def _by_accelerators_over_four() -> None:
    _accelerated(dp_shard_size=2, tp_size=2, fsdp=True)
    _accelerated(dp_shard_size=2, tp_size=2, fsdp=True, ignored=r"blocks\.0")  # split, and not sharded
    _accelerated(dp_shard_size=2, cp_size=2, fsdp=True)
    _accelerated(dp_shard_size=2, sp_size=2, fsdp=True)
    _accelerated(dp_replicate_size=2, dp_shard_size=2, fsdp=True)
    _accelerated(cp_size=2, tp_size=2, fsdp=True)
    _accelerated(dp_replicate_size=2, sp_size=2)
    _accelerated(tp_size=2, cp_size=2, early=True)  # by the private name that other projects call


def _transformers_models() -> dict[str, Callable[[], nn.Module]]:
    transformers = pytest.importorskip("transformers")
    common = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
    }
    grouped = {**common, "num_key_value_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    gpt2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**grouped, tie_word_embeddings=True, pad_token_id=3)
        ),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**grouped, head_dim=4)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**gpt2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        ),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**common, **no_dropout)),
        "all windows": lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(**grouped, sliding_window=3)
        ),
        "some windows": lambda: transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(
                **grouped, sliding_window=3, use_sliding_window=True, max_window_layers=1
            )
        ),
    }


def _transformers_batch(padding: str) -> dict[str, Tensor]:
    ids = torch.randint(4, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padding != "none":
        mask = torch.ones_like(ids)
        mask[0, 6:] = mask[1, 3:] = 0
        mask = mask.flip(1) if padding == "left" else mask
        batch["input_ids"][mask == 0] = 3
        batch["labels"][mask == 0] = -100
        batch["attention_mask"] = mask
    return batch


def _transformers_train(axis: str, kinds: list[str], paddings: tuple[str, ...]) -> None:
    """One loss and its gradients, of models that know nothing of split sequences; float32 in transformers' own loss."""
    from acc_plugins import ParallelismConfig
    from acc_trainer import Accelerator

    config = ParallelismConfig(**{f"{axis}_size": 2})
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    for kind, padding in ((kind, padding) for kind in kinds for padding in paddings):
        make = _transformers_models()[kind]
        torch.manual_seed(0)
        reference = make().double()
        torch.manual_seed(accelerator.process_index)
        own = make().double()
        model = accelerator.prepare(own)
        batch = _transformers_batch(padding)
        expected = reference(**batch).loss
        expected.backward()
        if axis == "sp":
            (cut,) = accelerator.deepspeed_ulysses_dl_adapter([batch], model)
            targets = cut.pop("shift_labels").flatten()
            total = accelerator.reduce((targets != -100).sum().double(), "mean")
            scores = model(**cut).logits.flatten(0, 1)
            loss = F.cross_entropy(scores, targets, reduction="sum") / total
            accelerator.backward(loss)
        else:
            buffers = list(batch.values()) if axis == "cp" else None
            with accelerator.maybe_context_parallel(buffers, [1] * len(batch) if buffers else None):
                loss = model(**batch).loss
                accelerator.backward(loss)
        case = f"{axis} {kind} padding {padding}"
        assert accelerator.reduce(loss.detach(), "mean").item() == pytest.approx(expected.item(), abs=2e-6), (
            case
        )
        for name, p in reference.named_parameters():
            other = own.get_parameter(name).grad
            assert other is not None, (case, name)
            torch.testing.assert_close(_whole(other), p.grad, rtol=1e-5, atol=1e-6, msg=f"{case} {name}")
        accelerator.free_memory()
    accelerator.end_training()


def _models_of_transformers() -> None:
    _transformers_train("tp", ["llama", "qwen3"], ("none",))
    _transformers_train("cp", ["llama", "gpt2", "bert", "all windows", "some windows"], ("none", "left"))
    _transformers_train("sp", ["qwen3", "some windows"], ("right",))


def _loaded_split_by_transformers() -> None:
    """`tp_plan="auto"`: the weights come out of the file as DTensors, and are trained as they are."""
    import os
    import tempfile

    import acc_compat
    from acc_plugins import ParallelismConfig
    from acc_trainer import Accelerator

    acc_compat.install()  # transformers asks for accelerate there
    import transformers

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    world = current_world()
    os.environ.update(WORLD_SIZE="2", RANK=str(world.rank), LOCAL_RANK=str(world.rank))  # as a launcher does
    with tempfile.TemporaryDirectory() as folder:
        folder = world.comm.broadcast_object(folder)
        if world.is_main:
            torch.manual_seed(0)
            _transformers_models()["llama"]().double().save_pretrained(folder)
        world.comm.barrier()
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, tp_plan="auto")
        world.comm.barrier()
    assert sum(hasattr(p, "placements") for p in own.parameters()) >= 14
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), lr=1e-2))
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    batch = _transformers_batch("none")
    for _ in range(3):
        loss, expected = model(**batch).loss, reference(**batch).loss
        accelerator.backward(loss)
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=2e-6)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        told = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(norm, told, rtol=1e-5, atol=1e-6)
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    for name, p in reference.named_parameters():
        torch.testing.assert_close(
            _whole(own.get_parameter(name)).detach(), p.detach(), rtol=1e-4, atol=1e-5, msg=name
        )
    accelerator.end_training()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 32), nn.Linear(32, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _places_shared_out_between_split_layers() -> None:
    """torch's own styles: between the split layers each rank has half of the places, and norms see those only ("sequence_parallel")."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from acc_plugins import ParallelismConfig
    from acc_plugins.parallel import set_plan
    from acc_trainer import Accelerator

    def made(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        ends = nn.Embedding(_VOCABULARY, _WIDTH), nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY)
        return nn.Sequential(ends[0], Residual(), Residual(), *ends[1:]).double()

    def trained(model: nn.Module, backward: Any, clip: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(5):
            batch = _batch(step)
            loss = F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten())
            backward(loss)
            clip(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    reference, own = made(0), made(accelerator.process_index)
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "*.norm": "sequence_parallel",
        "*.up": ColwiseParallel(input_layouts=Shard(1)),
        "*.down": RowwiseParallel(output_layouts=Shard(1)),
        "3": "sequence_parallel",
        "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    set_plan(own, plan)
    seen: list[int] = []
    own[1].up.register_forward_pre_hook(lambda _, given: seen.append(given[0].to_local().shape[1]))
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), lr=1e-2))
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    expected = trained(reference, Tensor.backward, nn.utils.clip_grad_norm_, plain)
    got = trained(model, accelerator.backward, accelerator.clip_grad_norm_, optimizer)
    assert got == pytest.approx(expected, rel=1e-9)
    weights = {name: p.detach() for name, p in reference.named_parameters()}
    _assert_same({name: _whole(p.detach()) for name, p in own.named_parameters()}, weights)
    assert set(seen) == {_TIME // 2}
    accelerator.end_training()


def _what_cannot_be_split_is_an_error_everywhere() -> None:
    from acc_plugins.precisions.precision import Precision
    from acc_plugins.strategies.mesh import MeshStrategy
    from acc_plugins.strategies.strategy import Bundle

    world = current_world()
    config = _free_config(tp_size=2)
    strategy = MeshStrategy(world, Precision(), config, mesh=config.build_device_mesh("cpu"))
    model: Any = _model()
    if world.rank == 1:  # a plan that only one rank has
        model.tp_plan = {**Decoder.tp_plan, "blocks.*.up": "moe_tp_experts"}
    before = [id(p) for p in model.parameters()]
    with pytest.raises(ValueError, match=r"would treat Decoder differently.*'colwise'.*'moe_tp_experts'"):
        strategy.prepare(Bundle(models=[model]))
    model.tp_plan = {**Decoder.tp_plan, "blocks.*.up": "moe_tp_experts"}
    with pytest.raises(ValueError, match=r"blocks\.1\.up: the style 'moe_tp_experts' is not known"):
        strategy.prepare(Bundle(models=[model]))
    assert [id(p) for p in model.parameters()] == before
    config = _free_config(cp_size=2)
    strategy = MeshStrategy(world, Precision(), config, mesh=config.build_device_mesh("cpu"))
    if world.rank == 1:  # what only one rank has
        model.config = SimpleNamespace(_attn_implementation="eager")
    with pytest.raises(ValueError, match="computes attention by 'eager'") as caught:
        strategy.prepare(Bundle(models=[model]))
    assert (str(caught.value.__cause__) == "rank 1 raised this") == (world.rank == 0)
    for layer, why in (
        (nn.LSTM(2, 2), r"1 \(LSTM\) is recurrent"),
        (nn.Conv1d(2, 2, 3), "mixes 3 neighbouring places"),
        (nn.MultiheadAttention(2, 1), "attends to this rank's places only"),
    ):
        with pytest.raises(ValueError, match=why):
            strategy.prepare(Bundle(models=[nn.Sequential(nn.Linear(2, 2), layer)]))
    for options, why in (({"dp_shard_size": 2}, "which FSDP2 does"), ({"tp_size": 2}, "needs a mesh")):
        with pytest.raises(ValueError, match=why):
            MeshStrategy(
                world, Precision(), _free_config(**options), mesh=None if "tp_size" in options else object()
            )


def _what_is_left_out_is_the_same_on_ranks_that_split_a_layer() -> None:
    """Dropout of what every rank has: weights stay the same, though the ranks were seeded differently."""
    from acc_plugins.precisions.precision import Precision
    from acc_plugins.strategies.mesh import MeshStrategy
    from acc_plugins.strategies.strategy import Bundle

    world = current_world()
    torch.manual_seed(world.rank)
    config = _free_config(tp_size=2)
    strategy = MeshStrategy(world, Precision(), config, mesh=config.build_device_mesh("cpu"))
    own: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 8), nn.Linear(8, 1))
    own.tp_plan = {"2": "colwise", "3": "rowwise"}
    (model,) = strategy.prepare(Bundle(models=[own])).models
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        strategy.backward(model(torch.ones(3, 4)).sum())
        strategy.step(optimizer)
    everyone = world.comm.all_gather(own[0].weight.detach())
    assert torch.equal(everyone[0], everyone[1])


def _embeddings_of_every_style() -> None:
    """The part that is checked is the part that is split, and the numbers stay; a weight that two layers share stays one."""
    from acc_plugins import ParallelismConfig
    from acc_plugins.parallel import set_plan
    from acc_trainer import Accelerator

    class Scores(nn.Module):
        def __init__(self, rows: int, columns: int, *, tied: bool) -> None:
            super().__init__()
            self.tokens = nn.Embedding(rows, columns)
            self.head = nn.Linear(columns, rows, bias=False)
            if tied:
                self.head.weight = self.tokens.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.tokens(ids))

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    ids = torch.arange(6)
    for rows, columns, plan, tied in (
        (6, 5, {"tokens": "rowwise_rep"}, False),
        (6, 5, {"tokens": "rowwise_split_input"}, False),
        (7, 8, {"tokens": "colwise_rep"}, False),
        (7, 8, {"tokens": "colwise_gather_output"}, False),
        (6, 5, {"tokens": "rowwise_rep", "head": "colwise_rep"}, True),
        (7, 8, {"tokens": "colwise_gather_output"}, True),
        (7, 8, {"tokens": "colwise_rep", "head": "rowwise_rep"}, True),
    ):
        torch.manual_seed(0)
        own = Scores(rows, columns, tied=tied)
        expected = own(ids).detach()
        set_plan(own, plan)
        model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
        torch.testing.assert_close(model(ids), expected)
        assert (own.head.weight is own.tokens.weight) == tied
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        assert list(map(id, listed)) == list(map(id, own.parameters()))
    accelerator.end_training()


def _a_compiled_model_is_reached_too() -> None:
    from acc_plugins import ParallelismConfig
    from acc_trainer import Accelerator

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    own = _model()
    model = torch.compile(accelerator.prepare(own), backend="eager")
    batch, places = _batch(0), torch.arange(_TIME)[None].repeat(4, 1)
    with accelerator.maybe_context_parallel([*batch.values(), places], [1] * 3):
        scores = model(batch["ids"], places).flatten(0, 1)
        accelerator.backward(F.cross_entropy(scores, batch["targets"].flatten()))
    _, expected, _ = _reference(1)
    _assert_same({name: _whole(p.grad) for name, p in own.named_parameters()}, expected)
    accelerator.end_training()


def _ranks_that_split_differently_are_told() -> None:
    from acc_plugins import ParallelismConfig
    from acc_plugins.parallel import set_plan
    from acc_trainer import Accelerator

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    rank = accelerator.process_index
    accelerator.prepare(_model())
    for length, width in ((8 + 2 * rank, 1), (8, 1 + rank), (8 + rank, 1)):
        buffer = torch.zeros(width, length)
        with pytest.raises(ValueError, match=r"same shapes|another rank cannot cut|9 places"):
            accelerator.maybe_context_parallel([buffer], [1])
        assert buffer.shape == (width, length)
    accelerator.end_training()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    own = nn.Sequential(nn.Linear(4, 4))
    set_plan(own, {"0": "colwise" if rank else "colwise_gather_output"})
    with pytest.raises(ValueError, match=r"'colwise_gather_output'. on rank 0, .'0', 'colwise'. on rank 1"):
        accelerator.prepare(own)
    assert own[0].weight.shape == (4, 4)
    accelerator.end_training()


def _what_is_unfrozen_later_is_averaged() -> None:
    from acc_plugins import ParallelismConfig
    from acc_trainer import Accelerator

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    own = nn.Linear(2, 1).requires_grad_(False)
    model = accelerator.prepare(own)
    own.requires_grad_(True)
    accelerator.backward(model(torch.full((1, 2), float(accelerator.process_index))).sum())
    assert own.weight.grad is not None
    assert own.weight.grad.tolist() == [[0.5, 0.5]]
    accelerator.end_training()


def test_two_processes_train_as_one_does() -> None:
    run_processes(
        2,
        _run_all,
        [
            _layers_over_two,
            _sequences_over_two,
            _heads_over_two,
            _by_accelerators_over_two,
            _places_shared_out_between_split_layers,
            _what_cannot_be_split_is_an_error_everywhere,
            _what_is_left_out_is_the_same_on_ranks_that_split_a_layer,
            _embeddings_of_every_style,
            _a_compiled_model_is_reached_too,
            _ranks_that_split_differently_are_told,
            _what_is_unfrozen_later_is_averaged,
        ],
    )


def test_models_of_transformers_train_as_in_one_process() -> None:
    pytest.importorskip("transformers")
    run_processes(2, _run_all, [_loaded_split_by_transformers, _models_of_transformers])


def test_four_processes_train_as_one_does() -> None:
    run_processes(4, _run_all, [_mixes_over_four, _by_accelerators_over_four], timeout_s=240)
