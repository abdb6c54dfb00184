"""Loops, routing, packing and reshapes that bring samples to the weights in an order of their own."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .case import Built, Case, Net, case, gaussian, parameter, tokens

CASES: list[Case] = []


def with_lengths(forward: Callable[..., Tensor], recurrent: nn.Module, features: int) -> Built:
    """24 sequences of 1 to 5 steps, and 7 others."""
    x, x2 = gaussian(5, 3, P=24, P2=7)
    lengths, lengths2 = torch.randint(1, 6, (24,)), torch.randint(1, 6, (7,))
    model = Net(forward, recurrent=recurrent, head=nn.Linear(features, 2))
    return model, (x, lengths), (x2, lengths2), None


@case(CASES, flags=("odd",))
def packed_gru() -> Built:
    """torch sorts sequences by length and packs them time by time; the last state comes back unsorted."""

    def forward(self: Net, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.recurrent(packed)[1][-1])

    return with_lengths(forward, nn.GRU(3, 4, batch_first=True), 4)


@case(CASES, flags=("odd",))
def packed_lstm_in_both_directions() -> Built:
    """Packed, read in both directions, and padded again."""

    def forward(self: Net, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=5)
        return self.head(states.sum(1))

    return with_lengths(forward, nn.LSTM(3, 4, batch_first=True, bidirectional=True), 8)


@case(CASES, flags=("odd",))
def layer_on_the_data_of_a_packed_sequence() -> Built:
    """A layer is applied to the packed rows themselves: time major, fewer samples at each later step."""

    def forward(self: Net, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        data = torch.tanh(self.recurrent(packed.data))
        rest = packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
        return self.head(pad_packed_sequence(PackedSequence(data, *rest), batch_first=True)[0].sum(1))

    return with_lengths(forward, nn.Linear(3, 4), 4)


def experts(forward: Callable[..., Tensor], P: int = 24) -> Built:
    parts = {"router": nn.Linear(3, 4), "experts": nn.ModuleList(nn.Linear(3, 5) for _ in range(4))}
    return Net(forward, **parts, head=nn.Linear(5, 2)), *gaussian(3, P=P, P2=7 if P > 7 else 3), None


@case(CASES, flags=("odd",))
def experts_top1_by_masks() -> Built:
    """Each sample goes to one expert, selected and written by a boolean mask; nothing is dropped."""

    def forward(self: Net, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            out[mask] = gates[mask, None] * torch.tanh(expert(x[mask]))
        return self.head(out)

    return experts(forward)


@case(CASES, flags=("odd",))
def five_samples_to_experts_by_masks() -> Built:
    """Five samples and four experts, of which some get none."""

    def forward(self: Net, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 5)
        for number in chosen.unique().tolist():
            mask = chosen == number
            out[mask] = gates[mask, None] * torch.tanh(self.experts[number](x[mask]))
        return self.head(out)

    return experts(forward, P=5)


@case(CASES, flags=("odd",))
def experts_top2_by_index_add() -> Built:
    """Each sample goes to two experts, and index_add adds what they say."""

    def forward(self: Net, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(1).topk(2)
        out = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, gates[rows, slots, None] * torch.tanh(expert(x[rows])))
        return self.head(out)

    return experts(forward)


@case(CASES, flags=("odd",))
def experts_top2_sorted_by_expert() -> Built:
    """The 2 P choices are sorted by expert and split by count; rows come back by the inverse order."""

    def forward(self: Net, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=4).tolist()
        parts = x[order // 2].split(counts)
        rows = torch.cat([torch.tanh(expert(part)) for expert, part in zip(self.experts, parts, strict=True)])
        return self.head((gates[:, :, None] * rows[order.argsort()].view(len(x), 2, 5)).sum(1))

    return experts(forward)


@case(CASES, flags=("odd",))
def shifted_windows_inside_samples() -> Built:
    """Positions are rolled by one inside each sample and cut into windows, which become rows of one batch."""

    def forward(self: Net, x: Tensor) -> Tensor:
        windows = x.roll(-1, 1).reshape(len(x), 3, 2, 3).transpose(0, 1).flatten(0, 1)
        rows = torch.tanh(self.body(windows.flatten(1))).view(3, len(x), 2, 4).transpose(0, 1).flatten(1, 2)
        return self.head(rows.roll(1, 1).flatten(1))

    return Net(forward, body=nn.Linear(6, 8), head=nn.Linear(24, 2)), *gaussian(6, 3, P=24, P2=7), None


@case(CASES, flags=("odd",))
def windows_across_the_borders_of_samples() -> Built:
    """Rows of all samples are rolled by one, so that windows hold rows of two samples; the layer acts on rows alone."""

    def forward(self: Net, x: Tensor) -> Tensor:
        windows = x.flatten(0, 1).roll(-1, 0).view(-1, 2, 3)
        rows = torch.tanh(self.body(windows)) + self.shift
        return self.head(rows.view(-1, 5).roll(1, 0).view(len(x), -1))

    model = Net(forward, body=nn.Linear(3, 5), shift=parameter(5), head=nn.Linear(20, 2))
    return model, *gaussian(4, 3, P=24, P2=7), None


def two_layers(forward: Callable[..., Tensor], P: int = 24) -> Built:
    return Net(forward, body=nn.Linear(3, 5), head=nn.Linear(5, 2)), *gaussian(3, P=P, P2=7 if P > 7 else 3), None


@case(CASES, flags=("odd",))
def loop_over_samples_in_sorted_order() -> Built:
    """One call for each sample, the one with the largest number first."""

    def forward(self: Net, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(descending=True, stable=True).tolist()
        rows = {i: torch.tanh(self.body(x[i])) for i in order}
        return self.head(torch.stack([rows[i] for i in range(len(x))]))

    return two_layers(forward)


@case(CASES, flags=("odd",))
def loop_over_pairs_of_samples() -> Built:
    """One call for the first and the last sample, one for the second and the last but one, and so on."""

    def forward(self: Net, x: Tensor) -> Tensor:
        out: list[Tensor] = [x.new_zeros(5)] * len(x)
        for i in range((len(x) + 1) // 2):
            j = len(x) - 1 - i
            pair = torch.tanh(self.body(x[[i, j]]))
            out[i], out[j] = pair[0], pair[1]
        return self.head(torch.stack(out))

    return two_layers(forward, P=5)


@case(CASES, flags=("odd",))
def chunks_of_a_sorted_batch() -> Built:
    """Sorted, then five samples a call, the last call with fewer."""

    def forward(self: Net, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(stable=True)
        rows = torch.cat([torch.tanh(self.body(part)) for part in x[order].split(5)])
        return self.head(rows[order.argsort()])

    return two_layers(forward)


@case(CASES, flags=("odd",))
def every_third_sample_in_one_call() -> Built:
    """Three calls with strided slices, written back by strided assignments."""

    def forward(self: Net, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 5)
        for start in range(min(3, len(x))):
            out[start::3] = torch.tanh(self.body(x[start::3]))
        return self.head(out)

    return two_layers(forward)


@case(CASES, flags=("odd",))
def vmap_over_sorted_samples() -> Built:
    """torch.vmap over samples in the order of a number they hold, in chunks of five."""

    def forward(self: Net, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(stable=True)
        rows = torch.vmap(lambda sample: torch.tanh(self.body(sample)), chunk_size=5)(x[order])
        return self.head(rows[order.argsort()])

    return two_layers(forward)


@case(CASES, flags=("odd",))
def vmap_over_the_last_axis() -> Built:
    """torch.vmap over samples that lie along the last axis."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.vmap(lambda sample: self.head(torch.tanh(self.body(sample))), in_dims=1, out_dims=1)(x.T).T

    return two_layers(forward, P=5)


@case(CASES, flags=("odd",))
def rows_of_positions_then_samples() -> Built:
    """Rows (T P, d), all samples of the first position first; a table of positions is added to the rows."""

    def forward(self: Net, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).flatten(0, 1)
        rows = torch.tanh(self.body(rows) + self.places.repeat_interleave(len(x), 0))
        return self.head(rows.view(4, len(x), 5).transpose(0, 1).flatten(1))

    model = Net(forward, body=nn.Linear(3, 5), places=parameter(4, 5), head=nn.Linear(20, 2))
    return model, *gaussian(4, 3, P=24, P2=7), None


@case(CASES, flags=("odd",))
def columns_hold_positions_and_samples() -> Built:
    """A weight on the left of a matrix whose columns are samples and positions interleaved."""

    def forward(self: Net, x: Tensor) -> Tensor:
        columns = x.permute(2, 1, 0).flatten(1)
        hidden = torch.tanh(self.weight @ columns + self.bias[:, None])
        return self.head(hidden.view(5, 4, len(x)).mean(1).T)

    model = Net(forward, weight=parameter(5, 3), bias=parameter(5), head=nn.Linear(5, 2))
    return model, *gaussian(4, 3, P=24, P2=7), None


def attending(forward: Callable[..., Tensor], P: int, P2: int, T: int) -> Built:
    model = Net(forward, inner=nn.Linear(6, 18), outer=nn.Linear(6, 5), head=nn.Linear(5, 2))
    return model, *gaussian(T, 6, P=P, P2=P2), None


@case(CASES, flags=("odd",))
def samples_merged_with_heads() -> Built:
    """Attention on (heads P, T, d), heads first, and a layer per head applied to that merged batch."""

    def forward(self: Net, x: Tensor) -> Tensor:
        P, T, _ = x.shape
        merged = self.inner(x).view(P, T, 3, 3, 2).permute(2, 3, 0, 1, 4).reshape(3, 3 * P, T, 2)
        attended = self.each(F.scaled_dot_product_attention(*merged))
        joined = attended.view(3, P, T, 2).permute(1, 2, 0, 3).reshape(P, T, 6)
        return self.head(torch.tanh(self.outer(joined)).mean(1))

    model, x, x2, readout = attending(forward, 24, 7, 4)
    model.each = nn.Linear(2, 2)
    return model, x, x2, readout


@case(CASES, flags=("odd",))
def five_samples_between_positions_and_heads() -> Built:
    """As torch's own attention, (T, P heads, d) with T first: samples stand between two other axes."""

    def forward(self: Net, x: Tensor) -> Tensor:
        P, T, _ = x.shape
        merged = self.inner(x.transpose(0, 1)).view(T, P, 3, 3, 2).permute(2, 0, 1, 3, 4).reshape(3, T, P * 3, 2)
        queries, keys, values = merged.transpose(1, 2)
        attended = torch.bmm(torch.bmm(queries, keys.mT).softmax(2), values)
        joined = attended.transpose(0, 1).reshape(T, P, 6)
        return self.head(torch.tanh(self.outer(joined)).mean(0))

    return attending(forward, 5, 3, 4)


@case(CASES, flags=("odd",))
def as_many_positions_as_samples() -> Built:
    """Sequence first with T = P = 7: nothing in a shape tells positions from samples."""

    def forward(self: Net, x: Tensor) -> Tensor:
        first = x.transpose(0, 1)
        queries, keys, values = self.inner(first).chunk(3, dim=2)
        weights = torch.einsum("sph,tph->pst", queries, keys).softmax(2)
        return self.head(torch.tanh(self.outer(torch.einsum("pst,tph->sph", weights, values)))[-1])

    return attending(forward, 7, 4, 7)


@case(CASES, flags=("odd",))
def recurrence_with_as_many_steps_as_samples() -> Built:
    """A sequence-first GRU with T = P = 5; a layer then acts on the (T, P) square of rows."""

    def forward(self: Net, x: Tensor) -> Tensor:
        states, _ = self.gru(x.transpose(0, 1))
        return self.head(torch.tanh(self.body(states)) * states)[0]

    model = Net(forward, gru=nn.GRU(3, 4), body=nn.Linear(4, 4), head=nn.Linear(4, 2))
    return model, *gaussian(5, 3, P=5, P2=4), None


@case(CASES, flags=("odd", "shared"))
def tokens_deduplicated_over_the_batch() -> Built:
    """Each distinct token of the batch goes through the layers once; samples look up the rows they share."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        distinct, inverse = ids.unique(return_inverse=True)
        rows = torch.tanh(self.body(self.table(distinct)))
        return self.head(rows[inverse].flatten(1))

    model = Net(forward, table=nn.Embedding(9, 3), body=nn.Linear(3, 5), head=nn.Linear(20, 2))
    return model, *tokens(9, 4, P=24, P2=7), None


@case(CASES, flags=("odd", "shared"))
def five_samples_share_tokens() -> Built:
    """Five samples of two tokens; the distinct ones are scored by a layer, and looked up as an embedding."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        distinct, inverse = ids.unique(return_inverse=True)
        rows = torch.tanh(self.body(self.table(distinct)))
        return self.head(F.embedding(inverse, rows).flatten(1))

    model = Net(forward, table=nn.Embedding(6, 3), body=nn.Linear(3, 4), head=nn.Linear(8, 2))
    return model, *tokens(6, 2), None


@case(CASES, flags=("odd", "shared"))
def equal_samples_computed_once() -> Built:
    """Of equal rows only one goes through the layers; the batch has some, and unique() sorts the others."""

    def forward(self: Net, x: Tensor) -> Tensor:
        distinct, inverse = x.unique(dim=0, return_inverse=True)
        return self.head(torch.tanh(self.body(distinct)))[inverse]

    model, x, x2, readout = two_layers(forward)
    x[7], x[20], x[21] = x[3].clone(), x[4].clone(), x[4].clone()
    return model, x, x2, readout


def patches_of(x: Tensor) -> Tensor:
    """(P, 6, 8): six patches of 2 x 2 pixels and two channels."""
    return F.unfold(x, 2, stride=2).transpose(1, 2)


@case(CASES, flags=("odd",))
def patches_of_all_images_shuffled() -> Built:
    """Patches of all images in one shuffled list, the same at every call, and undone after the layer."""

    def forward(self: Net, x: Tensor) -> Tensor:
        patches = patches_of(x).transpose(0, 1).flatten(0, 1)
        shuffled = torch.randperm(len(patches), generator=torch.Generator().manual_seed(0)).to(x.device)
        rows = torch.tanh(self.body(patches[shuffled]))[shuffled.argsort()]
        return self.head(rows.view(6, len(x), 5).mean(0))

    return Net(forward, body=nn.Linear(8, 5), head=nn.Linear(5, 2)), *gaussian(2, 4, 6, P=24, P2=7), None


@case(CASES, flags=("odd",))
def patches_of_all_images_sorted() -> Built:
    """Patches of all images sorted by their mean; index_copy undoes it and fold paints images again."""

    def forward(self: Net, x: Tensor) -> Tensor:
        patches = patches_of(x).flatten(0, 1)
        order = patches.mean(1).argsort(stable=True)
        rows = torch.tanh(self.body(patches[order]))
        rows = torch.zeros_like(rows).index_copy(0, order, rows)
        images = F.fold(rows.view(len(x), 6, 8).transpose(1, 2), (4, 6), 2, stride=2)
        return self.head(torch.relu(self.conv(images)).mean((2, 3)))

    model = Net(forward, body=nn.Linear(8, 8), conv=nn.Conv2d(2, 3, 3), head=nn.Linear(3, 2))
    return model, *gaussian(2, 4, 6, P=24, P2=7), None


@case(CASES, flags=("odd",))
def images_side_by_side_in_sorted_order() -> Built:
    """Images sorted by brightness form one wide picture under a 1 x 1 convolution, and are cut apart again."""

    def forward(self: Net, x: Tensor) -> Tensor:
        order = x.mean((1, 2, 3)).argsort(stable=True)
        wide = x[order].permute(1, 2, 0, 3).flatten(2)[None]
        maps = torch.tanh(self.conv(wide))[0].unflatten(2, (len(x), 3)).permute(2, 0, 1, 3)
        return self.head(maps[order.argsort()].mean((2, 3)))

    return Net(forward, conv=nn.Conv2d(2, 5, 1), head=nn.Linear(5, 2)), *gaussian(2, 4, 3, P=24, P2=7), None
