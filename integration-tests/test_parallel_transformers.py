"""Models of transformers under tensor, context and sequence parallelism on two gloo processes: the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from decoder import whole
from torch import Tensor, nn

from acc_ops.testing import run_processes
from acc_ops.world import current_world


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
            torch.testing.assert_close(whole(other), p.grad, rtol=1e-5, atol=1e-6, msg=f"{case} {name}")
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
            whole(own.get_parameter(name)).detach(), p.detach(), rtol=1e-4, atol=1e-5, msg=name
        )
    accelerator.end_training()


def _run_all(checks: list[Callable[[], None]]) -> None:
    for check in checks:
        check()


def test_models_of_transformers_train_as_in_one_process() -> None:
    pytest.importorskip("transformers")
    run_processes(2, _run_all, [_loaded_split_by_transformers, _models_of_transformers])
