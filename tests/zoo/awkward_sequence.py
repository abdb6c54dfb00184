"""Recurrent networks and attention: positions, and sample axes that are not the first."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from .case import Built, Case, Net, case, gaussian, parameter, tokens

CASES: list[Case] = []


def last_of_first(output: tuple[Tensor, Any]) -> Tensor:
    """Last position of a batch-first recurrent layer, a few units of it."""
    return output[0][:, -1, :3]


@case(CASES, fallback=True)
def rnn_batch_first() -> Built:
    """The module itself, its output a tuple."""
    return nn.RNN(3, 4, batch_first=True), *gaussian(6, 3), last_of_first


@case(CASES, fallback=True)
def gru_two_layers() -> Built:
    """Two layers with dropout between them."""
    return nn.GRU(3, 4, num_layers=2, dropout=0.4, batch_first=True), *gaussian(4, 3), last_of_first


@case(CASES, fallback=True)
def lstm_bidirectional_two_layers() -> Built:
    """Both directions, two layers; the output is the final states, samples on the second axis."""

    def readout(output: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        return output[1][0].transpose(0, 1).flatten(1)[:, ::4]

    return nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), *gaussian(4, 3, P=3, P2=2), readout


@case(CASES, fallback=True)
def lstm_with_projection() -> Built:
    """proj_size: a weight without bias inside the cell."""
    return nn.LSTM(3, 5, proj_size=2, batch_first=True), *gaussian(4, 3), last_of_first


@case(CASES, fallback=True)
def gru_sequence_first() -> Built:
    """Time first inside, T = P."""

    def forward(self: Net, x: Tensor) -> Tensor:
        states, _ = self.gru(x.transpose(0, 1))
        return self.head(states[-1])

    return Net(forward, gru=nn.GRU(3, 4), head=nn.Linear(4, 2)), *gaussian(5, 3), None


@case(CASES, fallback=True)
def lstm_with_learned_initial_state() -> Built:
    """The first state is a parameter expanded over samples."""

    def forward(self: Net, x: Tensor) -> Tensor:
        state = self.state.expand(1, len(x), 4).contiguous()
        memory = self.memory.expand(1, len(x), 4).contiguous()
        return self.lstm(x, (state, memory))[0][:, -1, :2]

    lstm = nn.LSTM(3, 4, batch_first=True)
    return Net(forward, lstm=lstm, state=parameter(1, 1, 4), memory=parameter(1, 1, 4)), *gaussian(3, 3), None


@case(CASES)
def rnn_cell_loop() -> Built:
    """A cell called once per step."""

    def forward(self: Net, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 5)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state)

    return Net(forward, cell=nn.RNNCell(3, 5), head=nn.Linear(5, 2)), *gaussian(4, 3), None


@case(CASES, fallback=True)
def gru_and_lstm_cells() -> Built:
    """Cells with fused gates."""

    def forward(self: Net, x: Tensor) -> Tensor:
        state, memory = x.new_zeros(len(x), 4), x.new_zeros(len(x), 4)
        for step in range(x.shape[1]):
            state, memory = self.lstm(self.gru(x[:, step]), (state, memory))
        return state[:, :3]

    return Net(forward, gru=nn.GRUCell(3, 2), lstm=nn.LSTMCell(2, 4)), *gaussian(4, 3), None


@case(CASES, fallback=True)
def packed_sequences() -> Built:
    """Samples of unequal length, sorted and packed inside: rows of one product belong to varying sets of samples."""

    def forward(self: Net, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])

    x, x2 = gaussian(6, 3, P=5, P2=3)
    lengths, lengths2 = torch.tensor([2, 6, 1, 4, 4]), torch.tensor([3, 1, 5])
    return Net(forward, lstm=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 2)), (x, lengths), (x2, lengths2), None


@case(CASES)
def attention_batch_first() -> Built:
    """nn.MultiheadAttention: out_proj is used without being called; in_proj is one fused weight."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    return (
        Net(forward, attention=nn.MultiheadAttention(6, 2, batch_first=True), head=nn.Linear(6, 3)),
        *gaussian(4, 6),
        None,
    )


@case(CASES)
def attention_sequence_first() -> Built:
    """T = P, samples on the second axis; weights are returned, so another code path runs."""

    def forward(self: Net, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        attended, weights = self.attention(x, x, x, need_weights=True)
        return torch.cat([attended[0, :, :2], weights[:, 0, :1]], dim=1)

    return Net(forward, attention=nn.MultiheadAttention(4, 2)), *gaussian(5, 4), None


@case(CASES)
def attention_with_bias_kv() -> Built:
    """add_bias_kv and add_zero_attn: parameters are repeated over samples and appended to the positions."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0].mean(1)[:, :3]

    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    return Net(forward, attention=attention), *gaussian(3, 4), None


@case(CASES)
def attention_cross_with_masks() -> Built:
    """Queries and keys of unequal length and width, padded keys, a causal-like mask; mapping input."""

    def forward(self: Net, query: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        return self.attention(query, memory, memory, key_padding_mask=padding, need_weights=False)[0].mean(1)[:, :2]

    def inputs(samples: int) -> dict[str, Tensor]:
        padding = torch.zeros(samples, 5, dtype=torch.bool)
        padding[::2, 3:] = True
        return {"query": torch.randn(samples, 3, 4), "memory": torch.randn(samples, 5, 6), "padding": padding}

    attention = nn.MultiheadAttention(4, 2, kdim=6, vdim=6, batch_first=True)
    return Net(forward, attention=attention), inputs(4), inputs(3), None


@case(CASES)
def transformer_encoder_layer() -> Built:
    """Eval mode has a fused fast path without a graph, taken when nothing requires grad."""
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, dropout=0.2, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2)), *gaussian(3, 4), None


@case(CASES)
def transformer_encoder_with_padding() -> Built:
    """Two layers, norm first, padding mask: nested tensors lie in wait."""

    def forward(self: Net, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])

    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, activation="gelu", norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4), enable_nested_tensor=False)
    x, x2 = gaussian(5, 4, P=4)
    padding, padding2 = torch.zeros(4, 5, dtype=torch.bool), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 2:] = padding[3, 4:] = padding2[0, 3:] = True
    return Net(forward, encoder=encoder, head=nn.Linear(4, 2)), (x, padding), (x2, padding2), None


@case(CASES)
def transformer_decoder_layer() -> Built:
    """Sequence first, self- and cross-attention, causal mask."""

    def forward(self: Net, target: Tensor, memory: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        decoded = self.decoder(target.transpose(0, 1), memory.transpose(0, 1), tgt_mask=causal, tgt_is_causal=True)
        return decoded[-1, :, :3]

    decoder = nn.TransformerDecoderLayer(4, 2, 6)
    x, x2 = gaussian(3, 4), gaussian(6, 4)
    return Net(forward, decoder=decoder), (x[0], x2[0]), (x[1], x2[1]), None


@case(CASES)
def fused_query_key_value() -> Built:
    """Scaled dot product attention by hand, causal, one fused projection cut in three."""

    def forward(self: Net, x: Tensor) -> Tensor:
        P, T, d = x.shape
        query, key, value = self.fused(x).view(P, T, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(P, T, d))[:, -1, :3]

    return Net(forward, fused=nn.Linear(4, 12), out=nn.Linear(4, 4, bias=False)), *gaussian(6, 4), None


@case(CASES)
def attention_with_heads_before_samples() -> Built:
    """Heads are moved in front of the batch axis, (h b), and linear layers act there."""

    def forward(self: Net, x: Tensor) -> Tensor:
        P, T, _ = x.shape
        heads = x.view(P, T, 2, 3).permute(2, 0, 1, 3).reshape(2 * P, T, 3)
        scores = self.query(heads) @ self.key(heads).transpose(1, 2)
        mixed = scores.softmax(-1) @ self.value(heads)
        return self.head(mixed.view(2, P, T, 3).mean(2).permute(1, 0, 2).flatten(1))

    parts = {name: nn.Linear(3, 3) for name in ("query", "key", "value")}
    return Net(forward, **parts, head=nn.Linear(6, 2)), *gaussian(4, 6), None


@case(CASES)
def windowed_attention() -> Built:
    """Windows merged into the batch axis, shifted, with a relative position table, as in Swin."""

    def forward(self: Net, x: Tensor) -> Tensor:
        P, T, d = x.shape
        windows = x.roll(1, dims=1).reshape(P * T // 3, 3, d)
        query, key, value = self.fused(windows).chunk(3, dim=-1)
        positions = torch.arange(3, device=x.device)
        bias = self.table[positions[:, None] - positions[None, :] + 2]
        mixed = (query @ key.transpose(1, 2) + bias).softmax(-1) @ value
        return self.head(mixed.reshape(P, T, d).roll(-1, dims=1).mean(1))

    return Net(forward, fused=nn.Linear(4, 12), table=parameter(5), head=nn.Linear(4, 2)), *gaussian(6, 4, P=4), None


@case(CASES)
def window_major_rows() -> Built:
    """Windows in front of samples: (windows * P) rows, with as many windows as samples."""

    def forward(self: Net, x: Tensor) -> Tensor:
        P, T, d = x.shape
        windows = x.view(P, T // 2, 2 * d).transpose(0, 1).reshape(-1, 2 * d)
        return torch.tanh(self.body(windows)).view(T // 2, P, 3).mean(0)

    return Net(forward, body=nn.Linear(6, 3)), *gaussian(8, 3, P=4), None


@case(CASES)
def sequence_first_square() -> Built:
    """Sequence first with T = P and d = P."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.transpose(0, 1))).mean(0))

    return Net(forward, body=nn.Linear(4, 4), head=nn.Linear(4, 3)), *gaussian(4, 4, P=4), None


@case(CASES)
def sequence_first_last_token() -> Built:
    """Sequence first with T = P, and gradients at one position only."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.transpose(0, 1)))[-1])

    return Net(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 2)), *gaussian(5, 3), None


@case(CASES)
def time_major_rows() -> Built:
    """Flattened rows with time in front, T = P."""

    def forward(self: Net, x: Tensor) -> Tensor:
        P, T, d = x.shape
        rows = x.transpose(0, 1).reshape(T * P, d)
        return self.head(torch.tanh(self.body(rows)).view(T, P, 4).permute(1, 0, 2).flatten(1))

    return Net(forward, body=nn.Linear(3, 4), head=nn.Linear(20, 2)), *gaussian(5, 3), None


@case(CASES)
def sample_reads_its_own_position() -> Built:
    """T = P and sample i reads position i: gradients are a diagonal, both axes look like samples."""

    def forward(self: Net, x: Tensor, position: Tensor) -> Tensor:
        states = torch.tanh(self.body(x.transpose(0, 1)))
        chosen = states.gather(0, position[None, :, None].expand(1, -1, 4)).squeeze(0)
        return self.head(chosen)

    x, x2 = gaussian(5, 3)
    return (
        Net(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 2)),
        (x, torch.arange(5)),
        (x2, torch.tensor([4, 0, 2])),
        None,
    )


@case(CASES)
def mixer() -> Built:
    """Layers over positions and over channels in turn."""

    def forward(self: Net, x: Tensor) -> Tensor:
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        x = x + torch.tanh(self.channels(x))
        return self.head(x.mean(1))

    return Net(forward, tokens=nn.Linear(4, 4), channels=nn.Linear(3, 3), head=nn.Linear(3, 2)), *gaussian(4, 3), None


@case(CASES)
def language_model_with_position_table() -> Built:
    """Token and position embeddings, T = P; the position lookup has no sample axis."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.token(ids) + self.position(positions)
        return self.head(torch.relu(self.body(hidden)))

    parts = {
        "token": nn.Embedding(7, 4),
        "position": nn.Embedding(9, 4),
        "body": nn.Linear(4, 6),
        "head": nn.Linear(6, 3),
    }
    return Net(forward, **parts), *tokens(7, 5), lambda output: output[:, -1]


@case(CASES)
def class_token_and_positions() -> Built:
    """Bare parameters: a class token expanded over samples and concatenated, a position table added."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], dim=1) + self.positions
        mixed = hidden.softmax(dim=1) * hidden
        return self.head(mixed.sum(1))

    parts = {
        "token": parameter(1, 1, 4),
        "positions": parameter(1, 5, 4),
        "patches": nn.Linear(3, 4),
        "head": nn.Linear(4, 2),
    }
    return Net(forward, **parts), *gaussian(4, 3), None


@case(CASES)
def selective_scan() -> Built:
    """A state-space recurrence: decay from exp of a parameter, input-dependent gates."""

    def forward(self: Net, x: Tensor) -> Tensor:
        decay = -torch.exp(self.log_decay)
        rate = F.softplus(self.rate(x))
        state = x.new_zeros(len(x), 3, 4)
        for step in range(x.shape[1]):
            drive = rate[:, step, :, None] * x[:, step, :, None] * self.drive(x[:, step])[:, None, :]
            state = torch.exp(rate[:, step, :, None] * decay) * state + drive
        return (state @ self.out).squeeze(-1)

    parts = {"log_decay": parameter(3, 4), "rate": nn.Linear(3, 3), "drive": nn.Linear(3, 4), "out": parameter(4, 1)}
    return Net(forward, **parts), *gaussian(5, 3, P=4), None
