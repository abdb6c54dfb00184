"""A transformer that groks addition modulo 97: it remembers the examples first and finds the rule much later.

    python examples/trainings/grokking.py

One block without norms (as in Nanda et al. 2023), 40 % of all pairs, all of them in each step, AdamW with weight
decay. The output is divided by gamma < 1, which makes the start lazier (Kumar et al. 2024): 0.003 is lazy for 500
steps, 0.3 is not. About 4 minutes on an H200 with other work.
"""

import torch
from classification import DEVICE, accuracy, arguments, told
from torch import Tensor, nn

import featlearn as fl


class Adder(nn.Module):
    """Tokens a, b and = to the logits of a + b modulo `modulus`, read at =."""

    def __init__(self, modulus: int, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(modulus + 1, width)
        self.places = nn.Parameter(torch.randn(3, width) / width**0.5)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.expansion, self.contraction = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.readout = nn.Linear(width, modulus, bias=False)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(P, 3) to (P, modulus)."""
        h = self.tokens(x) + self.places
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.output(attended.transpose(1, 2).flatten(2))
        h = h + self.contraction(torch.relu(self.expansion(h)))
        logits: Tensor = self.readout(h[:, -1])
        return logits


def main() -> None:
    """Train and tell."""
    parser = arguments(__doc__, "grokking")
    parser.add_argument("--gamma", type=float, default=0.3, help="divisor of the output (%(default)s)")
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--rate", type=float, default=1e-3, help="of Adam, for gamma = 1 (%(default)s)")
    parser.add_argument("--decay", type=float, default=1.0, help="weight decay (%(default)s)")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    modulus, width, steps = (11, 16, 60) if given.smoke else (97, 128, given.steps)
    pairs = torch.cartesian_prod(torch.arange(modulus), torch.arange(modulus))[torch.randperm(modulus**2)]
    x = torch.cat([pairs, torch.full((len(pairs), 1), modulus)], 1).to(DEVICE)
    labels = (pairs.sum(1) % modulus).to(DEVICE)
    known = round(0.4 * len(x))
    model = fl.steer.scale_output(Adder(modulus, width).to(DEVICE), 1 / given.gamma)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # a step of Adam moves outputs by its rate over gamma: the rate follows gamma, and the decay per step stays
    optimizer = torch.optim.AdamW(
        trained, given.rate * min(1.0, given.gamma), betas=(0.9, 0.98), weight_decay=given.decay / min(1.0, given.gamma)
    )
    probe = min(128, known)
    watched = fl.watch(
        model,
        (x[:probe], labels[:probe]),
        out=given.out,
        test=(x[known:][:128], labels[known:][:128]),
        optimizer=optimizer,
        loss="cross-entropy",
        settings={"gamma": given.gamma, "seed": given.seed},
        overwrite=True,
        budget=None if given.smoke else 0.3,
    )
    with watched as watch:
        for step in range(1, steps + 1):
            loss = nn.functional.cross_entropy(model(x[:known]), labels[:known])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
            if step % max(1, steps // 100) == 0:
                seen, unseen = accuracy(model, x[:known], labels[:known]), accuracy(model, x[known:], labels[known:])
                watch.log(accuracy=seen, held_out_accuracy=unseen)
                if step % max(1, steps // 20) == 0:
                    print(f"step {step} of {steps}: loss {loss.item():.2e}, accuracy {seen:.3f}, unseen {unseen:.3f}")
    told(watch.run)


if __name__ == "__main__":
    main()
