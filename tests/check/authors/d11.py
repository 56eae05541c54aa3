import torch
from torch import nn


class BahdanauAttention(nn.Module):
    """score(s, h) = v^T tanh(W s + U h)

    query   B x Q          decoder state
    keys    B x S x K      encoder outputs
    mask    B x S          1.0 for words, 0.0 for padding

    Returns the context vector (B x K) and the alignment (B x S), a
    distribution over the words of the source sentence.
    """

    def __init__(self, query_size, key_size, hidden_size):
        super().__init__()
        self.W = nn.Linear(query_size, hidden_size, bias=False)
        self.U = nn.Linear(key_size, hidden_size, bias=True)
        self.v = nn.Linear(hidden_size, 1, bias=False)

    def precompute(self, keys):
        """Uh does not change between decoder steps."""
        return self.U(keys)

    def forward(self, query, keys, mask, projected=None):
        if projected is None:
            projected = self.precompute(keys)
        energy = self.v(torch.tanh(self.W(query).unsqueeze(1) + projected)).squeeze(-1)
        energy = energy - energy.max(dim=1, keepdim=True).values
        alpha = torch.exp(energy)
        alpha = alpha / alpha.sum(dim=1, keepdim=True)
        alpha = alpha * mask
        context = torch.bmm(alpha.unsqueeze(1), keys).squeeze(1)
        return context, alpha


class AttentiveDecoderCell(nn.Module):
    def __init__(self, emb, enc, hid):
        super().__init__()
        self.attention = BahdanauAttention(hid, enc, hid)
        self.cell = nn.GRUCell(emb + enc, hid)

    def forward(self, y_emb, state, keys, mask, projected=None):
        context, alpha = self.attention(state, keys, mask, projected)
        state = self.cell(torch.cat([y_emb, context], dim=-1), state)
        return state, context, alpha


if __name__ == "__main__":
    cell = AttentiveDecoderCell(16, 24, 32)
    keys = torch.randn(4, 13, 24)
    mask = (torch.arange(13)[None] < torch.tensor([[13], [9], [6], [2]])).float()
    state = torch.zeros(4, 32)
    pre = cell.attention.precompute(keys)
    for t in range(5):
        state, ctx, a = cell(torch.randn(4, 16), state, keys, mask, pre)
    print(state.shape, ctx.shape, a.shape)
