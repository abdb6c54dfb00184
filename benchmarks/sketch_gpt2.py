"""Kernel-task alignment of a network of GPT-2 small's size (124 M parameters, random weights) from sketched gradients.

    python benchmarks/sketch_gpt2.py [--sequences 10000] [--length 128] [--k 4096] [--repeats 4] [--data FOLDER]

One number for each sequence: the mean log-probability of its next tokens. Without --data tokens are random and the
target is constant: the direction of the gradient of the mean loss. With --data (the folder of input.txt, Shakespeare's
plays; each character a token) the target is whether a speech begins in the sequence, and the alignment is centered.
Prints the plan, the alignment with its standard error, seconds and peak memory beside the plan's; then, on --check
sequences, how far sketched entries are from the exact kernel and how many lie within two standard errors.
"""

import argparse
import resource
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import featlearn as fl
from featlearn_papers.data import shakespeare


def next_tokens(output: object, x: dict[str, Tensor]) -> Tensor:
    """(P,) the mean log-probability of the tokens that follow."""
    logits: Tensor = output.logits  # type: ignore[attr-defined]
    return logits[:, :-1].log_softmax(2).gather(2, x["input_ids"][:, 1:, None]).mean((1, 2))


def samples(options: argparse.Namespace, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(P, T) tokens, and targets (P,)."""
    count, length = options.sequences, options.length
    if options.data is None:
        return torch.randint(vocabulary, (count, length)), torch.ones(count)
    text = shakespeare(options.data)
    x, _ = text.windows(count, length)
    newline = text.vocabulary.index("\n")
    begins = ((x[:, :-1] == newline) & (x[:, 1:] == newline)).any(1)
    return x, 2.0 * begins - 1.0


def peak(device: torch.device) -> float:
    """GiB that were held at most: on a GPU by tensors, on a CPU by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def check(model: GPT2LMHeadModel, x: dict[str, Tensor], sketch: fl.Sketch) -> str:
    """Entries of the sketched kernel against the exact one."""
    exact = fl.ntk(model, x, readout=next_tokens)
    begun = time.perf_counter()
    found = fl.ntk(model, x, readout=next_tokens, sketch=sketch)
    off, scale = (found.value - exact).abs(), exact.diagonal().sqrt()
    held = float((off <= 2 * found.stderr).double().mean())
    relative = float((off / (scale[:, None] * scale)).square().mean().sqrt())
    seconds = time.perf_counter() - begun
    return f"{len(exact)} sequences: error {relative:.2g} sqrt(K_ii K_jj), {held:.1%} within two, {seconds:.1f} s"


def main(arguments: Sequence[str] | None = None) -> fl.Estimate:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--memory", default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default=None)
    parser.add_argument("--check", type=int, default=64)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(options.device)
    config = GPT2Config(
        vocab_size=options.vocabulary,
        n_layer=options.layers,
        n_embd=options.width,
        n_head=options.width // 64,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).to(device).eval()
    size = sum(p.numel() for p in model.parameters())
    tokens, y = samples(options, config.vocab_size)
    x, sketch = {"input_ids": tokens.to(device)}, fl.Sketch(options.k, options.repeats)
    print(f"{size / 1e6:.1f} M parameters, {len(tokens)} sequences of {options.length}, {device}", flush=True)
    if options.check:  # first, so that what the device does once is not counted below
        few = {"input_ids": x["input_ids"][: options.check]}
        print(check(model, few, sketch), flush=True)
    plan = fl.plan(model, x, readout=next_tokens, memory=options.memory, sketch=sketch)
    print(plan, flush=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begun = time.perf_counter()
    found = fl.estimate_alignment(
        model, x, y, centered=options.data is not None, readout=next_tokens, memory=options.memory, sketch=sketch
    )
    seconds = time.perf_counter() - begun
    print(
        f"alignment {found}, {seconds:.1f} s, peak {peak(device):.1f} GiB, planned {plan.peak / 2**30:.1f} GiB with "
        f"the kernel and {(plan.peak - plan.kernel_bytes) / 2**30:.1f} without",
        flush=True,
    )
    return found


if __name__ == "__main__":
    main()
