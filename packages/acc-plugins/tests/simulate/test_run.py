from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_plugins import FullyShardedDataParallelPlugin, ParallelismConfig
from acc_plugins.simulate import Simulation, simulate
from acc_plugins.simulate.plan import can_pretend
from acc_plugins.support import UnsupportedError

_WIDTH, _WORDS, _BLOCKS = 16, 64, 3
_BLOCK = 2 * 4 * _WIDTH * _WIDTH + 5 * _WIDTH  # elements of a block
_MODEL = _BLOCKS * _BLOCK + _WORDS * _WIDTH
_BATCH = torch.zeros(2, 8, dtype=torch.long)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Words(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        self.table = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(_BLOCKS))
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


needs_shards = pytest.mark.skipif(not can_pretend(), reason="this torch cannot gather what has no memory")


def _by_blocks(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options
    )


def _moved(result: Simulation, axis: str, kind: str) -> tuple[int, int]:
    """Payload and bytes sent of one kind of collective."""
    (found,) = [one for one in result.traffic if (one.axis, one.kind) == (axis, kind)]
    return found.payload, found.sent


def test_one_process_keeps_everything_and_sends_nothing() -> None:
    result = simulate(Words, _BATCH, world_size=1)
    assert result.parameters == _MODEL
    assert result.weights == result.gradients == 4 * _MODEL
    steps = 4 * len(list(Words().parameters()))  # AdamW keeps two moments, and a step for each parameter
    assert result.optimizer == 8 * _MODEL + steps
    assert result.traffic == ()
    assert result.peak >= result.kept


def test_replicas_exchange_all_gradients() -> None:
    result = simulate(Words, _BATCH, world_size=8)
    assert result.axes == {"dp_replicate": 8}
    assert result.buckets == result.gradients == 4 * _MODEL
    assert _moved(result, "dp_replicate", "all_reduce") == (4 * _MODEL, 2 * 4 * _MODEL * 7 // 8)


@needs_shards
@pytest.mark.parametrize(("reshards", "gathers"), [(True, 2), (False, 1)])
def test_shards_are_gathered_for_forward_and_again_for_backward(reshards: bool, gathers: int) -> None:
    result = simulate(Words, _BATCH, world_size=4, fsdp_plugin=_by_blocks(reshard_after_forward=reshards))
    assert result.weights == result.gradients == 4 * _MODEL // 4
    once, again = 4 * _MODEL, 4 * _BLOCKS * _BLOCK  # the root keeps its own between forward and backward
    payload = once + (gathers - 1) * again
    assert _moved(result, "dp_shard", "all_gather") == (payload, payload * 3 // 4)
    assert _moved(result, "dp_shard", "reduce_scatter") == (once, once * 3 // 4)


@needs_shards
def test_replicas_of_shards_reduce_what_they_have_scattered() -> None:
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    result = simulate(Words, _BATCH, world_size=8, parallelism=sizes, fsdp_plugin=_by_blocks())
    assert _moved(result, "dp_replicate", "all_reduce")[0] == 4 * _MODEL // 4


def test_split_layers_exchange_one_activation_per_block_and_direction() -> None:
    result = simulate(Words, _BATCH, world_size=4, parallelism=ParallelismConfig(tp_size=4))
    assert _moved(result, "tp", "all_reduce")[0] == 2 * _BLOCKS * _BATCH.numel() * _WIDTH * 4
    whole = _WORDS * _WIDTH + _BLOCKS * _WIDTH  # the table, and the biases of the layers split by rows
    assert result.weights == 4 * (whole + (_MODEL - whole) // 4)


@needs_shards
def test_sixteen_thousand_ranks_take_no_longer_than_their_meshes() -> None:
    sizes = ParallelismConfig(dp_replicate_size=16, dp_shard_size=128, tp_size=8)
    result = simulate(
        Words,
        _BATCH,
        world_size=16_384,
        parallelism=sizes,
        fsdp_plugin=_by_blocks(),
        mixed_precision="bf16",
    )
    assert result.axes == {"dp_replicate": 16, "dp_shard": 128, "tp": 8}
    assert {one.axis for one in result.traffic} == {"dp_replicate", "dp_shard", "tp"}


@needs_shards
def test_recomputing_keeps_fewer_activations() -> None:
    none, blocks, full = (
        simulate(Words, _BATCH, world_size=2, fsdp_plugin=_by_blocks(), recompute=how).activations
        for how in ("none", "blocks", "full")
    )
    assert none > blocks > full
    inputs = _BATCH.numel() * _WIDTH * 4
    assert none - blocks == _BLOCKS * 4 * inputs  # relu's output, which is four times as wide


@needs_shards
def test_blocks_that_a_policy_does_not_choose_cannot_be_recomputed() -> None:
    whole = FullyShardedDataParallelPlugin(fsdp_version=2)  # no policy: the model is one unit
    with pytest.raises(ValueError, match="recompute='blocks' finds no block of Words"):
        simulate(Words, _BATCH, world_size=2, fsdp_plugin=whole, recompute="blocks")


@needs_shards
def test_half_the_bits_gather_half_the_bytes() -> None:
    whole, half = (
        simulate(Words, _BATCH, world_size=2, fsdp_plugin=_by_blocks(), mixed_precision=how)
        for how in ("no", "bf16")
    )
    assert _moved(half, "dp_shard", "all_gather")[0] * 2 == _moved(whole, "dp_shard", "all_gather")[0]
    assert half.weights == whole.weights  # what is trained stays float32


def test_other_optimizers_keep_other_states() -> None:
    result = simulate(Words, _BATCH, world_size=1, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    assert result.optimizer == 0


@needs_shards
def test_the_model_the_batch_and_the_process_are_left_as_they_were() -> None:
    model = Words().train(False)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    simulate(model, _BATCH, world_size=4, fsdp_plugin=_by_blocks())
    assert not dist.is_initialized()
    assert not model.training
    for name, p in model.named_parameters():
        assert id(p) == before[name][0]
        assert torch.equal(p, before[name][1])
        assert p.grad is None
    assert model.head.weight is model.table.weight


def test_a_batch_may_be_named_or_in_order_and_the_loss_may_be_chosen() -> None:
    results = [
        simulate(Words, batch, world_size=1) for batch in (_BATCH, (_BATCH,), {"words": _BATCH.to("meta")})
    ]
    assert results[0] == results[1] == results[2]
    chosen = simulate(Words, _BATCH, world_size=1, loss=lambda output: output[0].mean())
    assert chosen.weights == results[0].weights


@needs_shards
def test_a_result_can_be_read_by_people_and_by_programs() -> None:
    result = simulate(Words, _BATCH, world_size=2, fsdp_plugin=_by_blocks())
    assert "2 ranks (dp_shard 2)" in str(result)
    assert "dp_shard all_gather" in str(result)
    again = json.loads(result.to_json())
    assert again["weights"] == result.weights
    assert again["traffic"][0]["axis"] == "dp_shard"
    assert result.sent() == result.sent("dp_shard") > 0


class Asking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size must be"),
        ({"world_size": 6, "parallelism": ParallelismConfig(tp_size=4)}, "make 4 ranks"),
        ({"world_size": 2, "mixed_precision": "fp4"}, "mixed_precision must be one of"),
        ({"world_size": 2, "recompute": "some"}, "recompute must be one of"),
        (
            {"world_size": 2, "recompute": "blocks", "model": lambda: nn.Linear(4, 4)},
            "auto_wrap_policy.*_no_split_modules",
        ),
        ({"world_size": 2, "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)}, "version 2"),
        ({"world_size": 2, "model": lambda: Asking(4, 4)}, "depends on values"),
        ({"world_size": 2, "loss": lambda output: output}, "must be one number"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], message: str) -> None:
    model = options.pop("model", Words)
    batch = torch.zeros(2, 4) if model is not Words else _BATCH
    with pytest.raises(ValueError, match=message):
        simulate(model, batch, **options)
    assert not dist.is_initialized()


@pytest.mark.skipif(can_pretend(), reason="this torch can")
def test_a_torch_that_cannot_is_said() -> None:
    with pytest.raises(UnsupportedError, match="newer torch"):
        simulate(Words, _BATCH, world_size=2, fsdp_plugin=_by_blocks())


def test_what_is_no_model_is_said() -> None:
    with pytest.raises(TypeError, match="needs a module"):
        simulate("bert", _BATCH, world_size=2)


def test_a_process_that_has_a_group_is_told() -> None:
    script = (
        "import torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "from acc_plugins.simulate import simulate\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "try: simulate(nn.Linear(2, 2), torch.zeros(1, 2), world_size=2)\n"
        "except RuntimeError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "has one already" in ran.stdout


def test_figures_add_up() -> None:
    result = simulate(Words, _BATCH, world_size=1)
    assert replace(result, weights=0).kept == result.kept - result.weights


def test_bytes_are_asked_for_by_an_axis_that_is_there() -> None:
    result = simulate(Words, _BATCH, world_size=4)
    with pytest.raises(KeyError, match="no axis 'tp': this world has dp_replicate"):
        result.sent("tp")
    assert result.sent("dp_replicate") == result.sent() > 0


@needs_shards
def test_what_goes_over_two_axes_at_once_is_asked_for_by_their_joined_name() -> None:
    sizes = ParallelismConfig(dp_shard_size=2, cp_size=2)
    result = simulate(Words, _BATCH, world_size=4, parallelism=sizes, fsdp_plugin=_by_blocks())
    assert result.sent("dp_shard_cp") > 0
    assert sum(result.sent(axis) for axis in (*result.axes, "dp_shard_cp")) == result.sent()


class Chosen(nn.Module):
    """How many rows it computes with depends on their values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[x[:, 0].nonzero()[:, 0]])


class Kept(Chosen):
    """A tensor in an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor


def test_what_values_decide_is_an_error_with_a_way_out() -> None:
    batch = torch.empty(2, 4)
    with pytest.raises(ValueError, match="path of Chosen depends on values"):
        simulate(Chosen, batch, world_size=2)
    linear = lambda: nn.Linear(4, 4)  # noqa: E731
    with pytest.raises(ValueError, match="LBFGS computes the loss again"):
        simulate(linear, batch, world_size=2, optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match=r"step of Adafactor depends on values.*AdamW"):
        simulate(linear, batch, world_size=2, optimizer=torch.optim.Adafactor)


@pytest.mark.skipif(not can_pretend(), reason="this torch has no error of its own for it")
def test_a_tensor_that_is_no_buffer_is_named_as_what_it_should_be() -> None:
    with pytest.raises(ValueError, match=r"Kept computes with a tensor.*register_buffer"):
        simulate(Kept, torch.empty(2, 4), world_size=2)


def test_threads_take_turns() -> None:
    sizes = (1, 2, 3, 4)
    found: dict[int, int] = {}

    def work(size: int) -> None:
        found[size] = simulate(lambda: nn.Linear(4, 4), torch.empty(2, 4), world_size=size).sent()

    threads = [threading.Thread(target=work, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    payload = 4 * 20
    assert found == {size: 2 * payload * (size - 1) // size for size in sizes}
    assert not dist.is_initialized()
