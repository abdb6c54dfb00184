"""Parameters that meet the samples in unusual operations: einsum, matmul from the left, lookups, where, powers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Built, Case, Net, case, gaussian, parameter, tokens

CASES: list[Case] = []


@case(CASES)
def weight_on_the_left() -> Built:
    """W @ x^T: samples are columns."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return (self.second @ torch.tanh(self.first @ x.T)).T

    return Net(forward, first=parameter(5, 4), second=parameter(2, 5)), *gaussian(4), None


@case(CASES)
def weight_on_the_left_of_positions() -> Built:
    """W @ x with x of shape (P, T, d): mixes positions; broadcast as a batch of one."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.tanh(self.weight @ x + self.shift[:, None]).mean(1)

    return Net(forward, weight=parameter(6, 4), shift=parameter(6)), *gaussian(4, 3), None


@case(CASES)
def matrix_vector_product() -> Built:
    """x @ v with v a vector: Mv, output (P,)."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.vector

    return Net(forward, first=parameter(4, 6), vector=parameter(6)), *gaussian(4), None


@case(CASES)
def dot_per_sample() -> Built:
    """A loop with torch.dot, torch.mv and torch.outer."""

    def forward(self: Net, x: Tensor) -> Tensor:
        rows = [
            torch.stack([torch.dot(self.a, s), torch.mv(self.W, s).sum(), torch.outer(s, self.a).norm()]) for s in x
        ]
        return torch.stack(rows)

    return Net(forward, a=parameter(4), W=parameter(3, 4)), *gaussian(4), None


@case(CASES)
def outer_product_features() -> Built:
    """x_i w_j as an outer product, then flattened."""

    def forward(self: Net, x: Tensor) -> Tensor:
        features = torch.sin(x.unsqueeze(2) * self.frequencies + self.phases)
        return self.head(features.flatten(1))

    return Net(forward, frequencies=parameter(3), phases=parameter(4, 1), head=nn.Linear(12, 2)), *gaussian(4), None


@case(CASES)
def einsum_index_orders() -> Built:
    """The same contraction with the weight's indices in three orders, first and last in the equation."""

    def forward(self: Net, x: Tensor) -> Tensor:
        a = torch.einsum("pi,io->po", x, self.a)
        b = torch.einsum("oi,pi->po", self.b, x)
        c = torch.einsum("pi,oki->pok", x, self.c).prod(2)
        return torch.tanh(a) * b + c

    return Net(forward, a=parameter(4, 3), b=parameter(3, 4), c=parameter(3, 2, 4)), *gaussian(4), None


@case(CASES)
def einsum_over_positions_and_heads() -> Built:
    """Weights of three axes contracted with positions, in orders that make einsum permute."""

    def forward(self: Net, x: Tensor) -> Tensor:
        heads = torch.einsum("ptd,hdk->htpk", x, self.split)
        mixed = torch.einsum("htpk,st->phsk", torch.tanh(heads), self.positions)
        return torch.einsum("phsk,hkc->pc", mixed, self.merge)

    return (
        Net(forward, split=parameter(2, 3, 4), positions=parameter(5, 5), merge=parameter(2, 4, 2)),
        *gaussian(5, 3),
        None,
    )


@case(CASES)
def einsum_of_three_operands() -> Built:
    """Data twice and a parameter in one einsum, and a repeated index (a diagonal)."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.einsum("pi,ijc,pj->pc", x, self.form, x) + torch.einsum("pi,iic->pc", x, self.form)

    return Net(forward, form=parameter(4, 4, 2)), *gaussian(4), None


@case(CASES)
def bilinear_layer() -> Built:
    """nn.Bilinear of two inputs."""
    (a, a2), (b, b2) = gaussian(4), gaussian(3)
    return nn.Bilinear(4, 3, 2), (a, b), (a2, b2), None


@case(CASES)
def bilinear_layers_over_positions() -> Built:
    """Two nn.Bilinear in a row, sequence first: rows of both are products of their inputs."""

    def forward(self: Net, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.transpose(0, 1), y.transpose(0, 1)))
        return self.second(hidden, hidden).mean(0)

    (a, a2), (b, b2) = gaussian(6, 3), gaussian(6, 4)
    return Net(forward, first=nn.Bilinear(3, 4, 5), second=nn.Bilinear(5, 5, 2)), (a, b), (a2, b2), None


@case(CASES)
def quadratic_form() -> Built:
    """x^T W W^T x: the weight on both sides."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return (x @ self.weight).square().sum(1) + ((x @ self.other) * x).sum(1)

    return Net(forward, weight=parameter(4, 3), other=parameter(4, 4)), *gaussian(4), None


@case(CASES)
def addmm_with_factors() -> Built:
    """addmm with alpha and beta, the second one adding to data."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.addmm(self.bias, x, self.weight, beta=0.5, alpha=2.0)
        return torch.addmm(hidden, torch.tanh(hidden), self.second, beta=-1.0, alpha=0.3)

    return Net(forward, bias=parameter(3), weight=parameter(4, 3), second=parameter(3, 3)), *gaussian(4), None


@case(CASES)
def addcmul_in_every_place() -> Built:
    """addcmul with a factor: a parameter added, one as either factor, one broadcast over positions."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(torch.addcmul(self.shift, x, self.scale, value=0.7))
        return torch.addcmul(hidden, self.row, hidden, value=-2.0).mean(1)

    return Net(forward, shift=parameter(3), scale=parameter(6, 3), row=parameter(6, 1)), *gaussian(6, 3), None


@case(CASES)
def baddbmm_with_expanded_weight() -> Built:
    """baddbmm and bmm with a weight expanded over samples."""

    def forward(self: Net, x: Tensor) -> Tensor:
        weight = self.weight.expand(len(x), 3, 4)
        bias = self.bias.expand(len(x), 5, 4)
        hidden = torch.tanh(torch.baddbmm(bias, x, weight, alpha=0.7))
        return torch.bmm(hidden, self.second.unsqueeze(0).expand(len(x), -1, -1)).mean(1)

    return Net(forward, weight=parameter(3, 4), bias=parameter(1, 1, 4), second=parameter(4, 2)), *gaussian(5, 3), None


@case(CASES)
def linear_experts_by_bmm() -> Built:
    """A stack of weights, one per expert, applied to the batch transposed to (experts, P, d)."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.baddbmm(self.biases.unsqueeze(1), x.expand(3, *x.shape), self.weights)
        return torch.tanh(hidden).mean(0)

    return Net(forward, weights=parameter(3, 4, 2), biases=parameter(3, 2)), *gaussian(4), None


@case(CASES)
def tensordot_and_inner() -> Built:
    """tensordot over two axes, inner, and a product with torch.multi_dot."""

    def forward(self: Net, x: Tensor) -> Tensor:
        a = torch.tensordot(x, self.a, dims=([1, 2], [2, 0]))
        return torch.linalg.multi_dot([torch.tanh(a), self.b, self.c]) + torch.inner(x.mean(1), self.d)

    parts = {"a": parameter(3, 5, 4), "b": parameter(5, 4), "c": parameter(4, 2), "d": parameter(2, 3)}
    return Net(forward, **parts), *gaussian(4, 3), None


@case(CASES)
def embedding_with_padding() -> Built:
    """padding_idx: padded tokens are there, their row gets no gradient."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)).mean(1))

    x, x2 = tokens(7, 5)
    x[0, 3:] = x[2, 1:] = x2[1, 2:] = 0
    return Net(forward, embedding=nn.Embedding(7, 4, padding_idx=0), head=nn.Linear(4, 2)), x, x2, None


@case(CASES)
def embedding_with_repeated_tokens() -> Built:
    """Tokens repeated within and across samples, vocabulary of two."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids) * self.embedding(ids.flip(1))).sum(1))

    return Net(forward, embedding=nn.Embedding(2, 4), head=nn.Linear(4, 3)), *tokens(2, 6), None


@case(CASES)
def sparse_embedding() -> Built:
    """sparse=True: the gradient is a sparse tensor."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)).flatten(1))

    return Net(forward, embedding=nn.Embedding(6, 3, sparse=True), head=nn.Linear(12, 2)), *tokens(6, 4), None


@case(CASES)
def embedding_of_one_token() -> Built:
    """ids of shape (P,), as a category."""
    return nn.Sequential(nn.Embedding(4, 6), nn.ReLU(), nn.Linear(6, 2)), *tokens(4, P=6), None


@case(CASES, fallback=True)
def embedding_bag_sum_and_mean() -> Built:
    """EmbeddingBag: bags of fixed length, summed with weights, averaged, with a padding index."""

    def forward(self: Net, ids: Tensor, weights: Tensor) -> Tensor:
        summed = self.total(ids, per_sample_weights=weights)
        return torch.tanh(summed) * self.average(ids)

    parts = {"total": nn.EmbeddingBag(6, 3, mode="sum"), "average": nn.EmbeddingBag(6, 3, mode="mean", padding_idx=1)}
    (ids, ids2), (weights, weights2) = tokens(6, 4), gaussian(4)
    return Net(forward, **parts), (ids, weights), (ids2, weights2), None


@case(CASES, fallback=True)
def embedding_bag_max() -> Built:
    """EmbeddingBag with the maximum, and a sparse one."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        return self.largest(ids) + torch.tanh(self.sparse(ids))

    parts = {"largest": nn.EmbeddingBag(6, 3, mode="max"), "sparse": nn.EmbeddingBag(6, 3, mode="mean", sparse=True)}
    return Net(forward, **parts), *tokens(6, 4), None


@case(CASES)
def parameter_lookups() -> Built:
    """W[ids], index_select, gather and take_along_dim on parameters."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        a = self.a[ids]
        b = self.b.index_select(1, ids).T
        c = self.c.expand(len(ids), -1).gather(1, ids[:, None])
        d = torch.take_along_dim(self.d, ids[:, None], dim=0)
        return torch.tanh(a * b) + c + d

    parts = {"a": parameter(6, 3), "b": parameter(3, 6), "c": parameter(1, 6), "d": parameter(6, 1)}
    return Net(forward, **parts), torch.tensor([4, 0, 5, 0, 2]), torch.tensor([0, 4, 1]), None


@case(CASES)
def one_hot_lookup() -> Built:
    """Embedding by a matrix product with one-hot rows, vocabulary = P."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        one_hot = F.one_hot(ids, 5).to(self.table.dtype)
        return self.head(torch.tanh(one_hot @ self.table).sum(1))

    return Net(forward, table=parameter(5, 3), head=nn.Linear(3, 2)), *tokens(5, 4), None


@case(CASES)
def parameter_concatenated_with_data() -> Built:
    """A parameter is appended to every sample as features, and as one more position."""

    def forward(self: Net, x: Tensor) -> Tensor:
        features = torch.cat([x, self.features.expand(*x.shape[:2], -1)], dim=2)
        positions = torch.cat([features, self.position.repeat(len(x), 1, 1)], dim=1)
        return self.head(torch.tanh(self.body(positions)).sum(1))

    parts = {"features": parameter(2), "position": parameter(1, 1, 5), "body": nn.Linear(5, 4), "head": nn.Linear(4, 2)}
    return Net(forward, **parts), *gaussian(4, 3), None


@case(CASES)
def samples_written_into_a_parameter_canvas() -> Built:
    """Masked positions are replaced by a parameter, as in masked pre-training."""

    def forward(self: Net, x: Tensor, masked: Tensor) -> Tensor:
        hidden = self.body(x)
        hidden = torch.where(masked[:, :, None], self.mask_token, hidden)
        return torch.tanh(hidden).sum(1)

    x, x2 = gaussian(4, 3)
    return Net(forward, body=nn.Linear(3, 2), mask_token=parameter(2)), (x, x[..., 0] > 0), (x2, x2[..., 0] > 0), None


@case(CASES)
def where_between_parameters() -> Built:
    """torch.where, masked_fill, clamp, minimum and maximum with parameters."""

    def forward(self: Net, x: Tensor) -> Tensor:
        slope = torch.where(x > 0, self.positive, self.negative)
        bounded = torch.maximum(torch.minimum(x * slope, self.upper), self.upper - 1.5)
        return self.head(torch.lerp(bounded, x, self.weight))

    parts = {"positive": parameter(4), "negative": parameter(), "upper": parameter(4), "weight": parameter(4)}
    return Net(forward, **parts, head=nn.Linear(4, 2)), *gaussian(4), None


@case(CASES)
def radial_basis_functions() -> Built:
    """Distances to centers that are parameters: cdist, then exp with a width."""

    def forward(self: Net, x: Tensor) -> Tensor:
        distances = torch.cdist(x, self.centers)
        return self.head(torch.exp(-(distances**2) * torch.exp(self.log_width)))

    return Net(forward, centers=parameter(6, 3), log_width=parameter(), head=nn.Linear(6, 2)), *gaussian(3), None


@case(CASES)
def distances_of_two_orders() -> Built:
    """cdist twice: to more than 25 centers, which is another op, then sums of absolute differences over positions."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.exp(-torch.cdist(x[:, 0], self.many))
        return torch.cdist(hidden, self.few) + torch.cdist(x, self.third, p=1.0).mean(1)

    return Net(forward, many=parameter(26, 3), few=parameter(2, 26), third=parameter(2, 3)), *gaussian(4, 3), None


@case(CASES)
def prototypes_by_broadcasting() -> Built:
    """Squared differences (P, 1, d) - (K, d), and cosine similarity to prototypes, K = P."""

    def forward(self: Net, x: Tensor) -> Tensor:
        squared = (x[:, None] - self.prototypes).square().sum(2)
        cosine = F.cosine_similarity(x[:, None], self.prototypes[None], dim=2)
        return (squared.neg().softmax(1) * cosine)[:, :3]

    return Net(forward, prototypes=parameter(5, 4)), *gaussian(4), None


@case(CASES)
def parameter_as_exponent() -> Built:
    """|x|^p with p a parameter, generalized-mean pooling, and a parameter as base."""

    def forward(self: Net, x: Tensor) -> Tensor:
        pooled = (x.abs() + 0.1).pow(self.exponent).mean(1).pow(1 / self.exponent)
        return torch.cat([pooled, self.base.pow(x[:, :, 0])], dim=1)

    return (
        Net(forward, exponent=nn.Parameter(torch.tensor(2.3)), base=nn.Parameter(torch.rand(4) + 0.5)),
        *gaussian(4, 2),
        None,
    )


@case(CASES)
def learned_activation() -> Built:
    """A rational activation: powers of the data times scattered coefficients, a division."""

    def forward(self: Net, x: Tensor) -> Tensor:
        x = self.body(x)
        numerator = sum(coefficient * x**k for k, coefficient in enumerate(self.numerator))
        return numerator / (1 + (self.denominator * x).abs())

    return Net(forward, body=nn.Linear(4, 3), numerator=parameter(4), denominator=parameter(3)), *gaussian(4), None


@case(CASES)
def deep_sets() -> Built:
    """Set pooling by sum and maximum, mask of members, mapping input."""

    def forward(self: Net, members: Tensor, present: Tensor) -> Tensor:
        encoded = torch.tanh(self.encode(members))
        total = (encoded * present[:, :, None]).sum(1)
        largest = encoded.masked_fill(present[:, :, None] == 0, -2.0).amax(1)
        return self.decode(torch.cat([total, largest], dim=1))

    def inputs(samples: int) -> dict[str, Tensor]:
        present = (torch.rand(samples, 6) > 0.3).double()
        present[:, 0] = 1.0
        return {"members": torch.randn(samples, 6, 3), "present": present}

    return Net(forward, encode=nn.Linear(3, 4), decode=nn.Linear(8, 2)), inputs(5), inputs(3), None


@case(CASES)
def message_passing() -> Built:
    """A graph network, dense adjacency as second input, as many nodes as samples."""

    def forward(self: Net, nodes: Tensor, adjacency: Tensor) -> Tensor:
        for _ in range(2):
            messages = adjacency @ self.message(nodes)
            nodes = torch.tanh(self.update(torch.cat([nodes, messages], dim=2)))
        return self.head(nodes.sum(1))

    def inputs(samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, 4, 3), (torch.rand(samples, 4, 4) > 0.5).double()

    parts = {"message": nn.Linear(3, 3, bias=False), "update": nn.Linear(6, 3), "head": nn.Linear(3, 2)}
    return Net(forward, **parts), inputs(4), inputs(3), None
