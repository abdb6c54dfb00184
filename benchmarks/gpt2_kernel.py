"""The tangent kernel of a network of GPT-2 small's size (124 M parameters, random weights) on 64 sequences.

    python benchmarks/gpt2_kernel.py [--sequences 64] [--length 128] [--memory 100GiB]

One number for each sequence: the mean logit of its next tokens. Every parameter counts, the tied embedding with the
cross terms of its two uses. Prints the plan, seconds, peak memory, and whether v^T K v = |J^T v|^2 holds for each
parameter (`verify=True` raises if not).
"""

import argparse
import time

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import featlearn as fl


def next_tokens(output: object, x: dict[str, Tensor]) -> Tensor:
    """(P,) the mean logit of the tokens that follow."""
    logits: Tensor = output.logits  # type: ignore[attr-defined]
    return logits[:, :-1].gather(2, x["input_ids"][:, 1:, None]).mean((1, 2))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--memory", default=None)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config(n_layer=options.layers, n_embd=options.width, n_head=options.width // 64, use_cache=False)
    model = GPT2LMHeadModel(config).to(device).eval()
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.1f} M parameters, {options.sequences} sequences of {options.length}, {device}", flush=True)
    x = {"input_ids": torch.randint(config.vocab_size, (options.sequences, options.length), device=device)}
    print(fl.plan(model, x, readout=next_tokens, memory=options.memory), flush=True)
    for verify in (False, True):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        kernel = fl.ntk(model, x, readout=next_tokens, memory=options.memory, verify=verify)
        trace = float(kernel.trace())  # waits for the device
        seconds = time.perf_counter() - begun
        peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device == "cuda" else ""
        print(f"verify={verify}: {seconds:.1f} s{peak}, trace {trace:.6g}, norm {float(kernel.norm()):.6g}", flush=True)


if __name__ == "__main__":
    main()
