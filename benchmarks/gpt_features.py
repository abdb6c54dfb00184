"""Neural features of a GPT of paper 003's size on real text: seconds, and what part of them is the bare passes.

    python benchmarks/gpt_features.py [--sequences 16] [--probes 4]

Three blocks, six heads, width 384, context 256, the 65 characters of Tiny Shakespeare (FEATLEARN_DATA names the folder
with shakespeare/input.txt). All logits of all positions are outputs, through random directions.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import featlearn as fl


def text(sequences: int, length: int) -> Tensor:
    """(sequences, length) character numbers from places far apart."""
    path = Path(os.environ.get("FEATLEARN_DATA", ".")) / "shakespeare" / "input.txt"
    characters = path.read_text(encoding="ascii")
    number = {character: place for place, character in enumerate(sorted(set(characters)))}
    starts = range(0, len(characters) - length, len(characters) // sequences)
    return torch.tensor([[number[c] for c in characters[i : i + length]] for i in list(starts)[:sequences]])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--probes", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=65, n_embd=384, n_layer=3, n_head=6, n_positions=256, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    ids = text(options.sequences, 256)

    begun = time.perf_counter()
    for _ in range(options.probes):
        logits = model(input_ids=ids).logits
        logits.backward(torch.randn_like(logits))
    passes = time.perf_counter() - begun
    model.zero_grad()

    begun = time.perf_counter()
    features = fl.neural_features(
        model, {"input_ids": ids}, readout=lambda out: out.logits.flatten(1), outputs=fl.Directions(options.probes)
    )
    seconds = time.perf_counter() - begun
    print(features)
    print(f"{options.sequences} sequences of 256 characters, {options.probes} directions: {seconds:.1f} s")
    print(f"as many forward and backward passes alone: {passes:.1f} s, ratio {seconds / passes:.1f}")


if __name__ == "__main__":
    main()
