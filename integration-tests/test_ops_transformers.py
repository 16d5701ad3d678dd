"""acc-ops with the containers of transformers as they really are: ModelOutput and BatchEncoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from acc_ops.batches import concatenate, find_batch_size, slice_tensors
from acc_ops.collectives import broadcast, gather, pad_across_processes, reduce, scatter
from acc_ops.precision import convert_to_fp32
from acc_ops.testing import run_threads
from acc_ops.tree import recursively_apply, send_to_device
from acc_ops.world import current_world

transformers = pytest.importorskip("transformers")
META = torch.device("meta")  # plays the other device


def output(rows: int = 2, value: float = 1.0) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(
        loss=torch.tensor(value),
        logits=torch.full((rows, 3), value, dtype=torch.float16),
        hidden_states=(torch.ones(rows, 2), torch.zeros(rows, 2)),
    )


def encoding(rows: int = 2) -> Any:
    return transformers.BatchEncoding(
        {"input_ids": torch.ones(rows, 4, dtype=torch.int64), "names": ["a"] * rows}
    )


def test_a_model_output_stays_one_and_its_keys_are_attributes_still() -> None:
    before = output()
    after = convert_to_fp32(before)
    assert type(after) is type(before)
    assert list(after) == list(before) == ["loss", "logits", "hidden_states"]
    assert after.logits is after["logits"] is after[1]
    assert after.logits.dtype == torch.float32
    assert before.logits.dtype == torch.float16
    assert after.hidden_states is before.hidden_states
    assert after.past_key_values is None
    assert recursively_apply(lambda tensor: tensor, before) is before
    assert send_to_device(before, "cpu") is before
    moved = send_to_device(before, META, skip_keys="loss")
    assert (moved.logits.device, moved.loss) == (META, before.loss)
    assert before.logits.device.type == "cpu"


def test_model_outputs_are_joined_cut_and_measured() -> None:
    whole = concatenate([output(2, 1.0), output(1, 2.0)])
    assert type(whole) is type(output())
    assert whole.loss.tolist() == [1.0, 2.0]
    assert whole.logits[:, 0].tolist() == [1.0, 1.0, 2.0]
    assert whole.hidden_states[0].shape == (3, 2)
    assert slice_tensors(whole, slice(2, 3)).logits.tolist() == [[2.0] * 3]
    assert find_batch_size(output(5)) == 5


def test_ranks_exchange_model_outputs() -> None:
    def call() -> list[Any]:
        rank = current_world().rank
        own = output(rank + 1, float(rank))
        padded = pad_across_processes(own)
        part = scatter([output(1, 5.0), output(2, 6.0)] if rank == 0 else None)
        return [gather(own), reduce(output(1, float(rank)), "mean"), broadcast(padded, 1), part]

    for rank, (gathered, mean, sent, part) in enumerate(run_threads(2, call)):
        assert {type(made) for made in (gathered, mean, sent, part)} == {type(output())}
        assert gathered.logits[:, 0].tolist() == [0.0, 1.0, 1.0]
        assert gathered["loss"].tolist() == [0.0, 1.0]
        assert mean.loss.item() == 0.5
        assert sent.logits.tolist() == [[1.0] * 3] * 2
        assert part.logits.shape == (rank + 1, 3)
        assert part.logits is part["logits"]


def test_a_batch_encoding_stays_one_and_is_not_written_to() -> None:
    before = encoding()
    ids = before["input_ids"]
    moved = send_to_device(before, META)
    assert type(moved) is type(before)
    assert moved["input_ids"].device == moved.input_ids.device == META
    assert before["input_ids"] is ids
    assert moved["names"] is before["names"]
    assert send_to_device(before, "cpu") is before
    joined = concatenate([encoding(2), encoding(1)])
    assert type(joined) is type(before)
    assert (joined["input_ids"].shape, joined["names"]) == ((3, 4), ["a"] * 3)
    assert find_batch_size(before) == 2


def test_what_a_tokenizer_says_beside_the_tensors_is_kept() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    letters = {letter: i for i, letter in enumerate("abc ")}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=" "))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=" ")
    before = tokenizer(["a", "b"], return_tensors="pt")
    moved = send_to_device(before, META)
    assert moved["input_ids"].device == META
    assert moved.is_fast
    assert moved.encodings == before.encodings


def test_ranks_exchange_batch_encodings() -> None:
    def call() -> Any:
        rank = current_world().rank
        ids = {"input_ids": torch.full((rank + 1, 2), rank)}
        return gather(transformers.BatchEncoding(ids))

    for made in run_threads(2, call):
        assert type(made) is transformers.BatchEncoding
        assert made["input_ids"].tolist() == [[0, 0], [1, 1], [1, 1]]
