import torch
import torch.nn as nn


class AttentionPooling(nn.Module):
    """Pool a sequence of token embeddings into one sentence vector.

    score_t = v^T tanh(W h_t), weights normalised over the tokens.
    """

    def __init__(self, in_dim: int, hidden: int = 128):
        super().__init__()
        self.W = nn.Linear(in_dim, hidden)
        self.v = nn.Linear(hidden, 1, bias=False)

    def forward(self, last_hidden_state, attention_mask=None):
        scores = self.v(torch.tanh(self.W(last_hidden_state)))       # [B, L, 1]
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask.unsqueeze(-1) == 0, -1e4)
        weights = torch.softmax(scores, dim=-1)
        return (weights * last_hidden_state).sum(dim=1)
