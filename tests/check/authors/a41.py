import torch
import torch.nn as nn


def softmax_one(x, dim=-1):
    """softmax with one extra in the denominator, so a head may attend to nothing
    (https://www.evanmiller.org/attention-is-off-by-one.html)"""
    x = x - x.max(dim=dim, keepdim=True).values
    exp_x = torch.exp(x)
    return exp_x / (1 + exp_x.sum(dim=dim, keepdim=True))


class QuietAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config["n_head"]
        self.d_head = config["d_model"] // config["n_head"]
        self.in_proj = nn.Linear(config["d_model"], 3 * config["d_model"])
        self.out_proj = nn.Linear(config["d_model"], config["d_model"])
        self.dropout = nn.Dropout(config.get("dropout", 0.0))

    def forward(self, x, padding_mask=None):
        # padding_mask: bool [batch, time], True = padding
        batch, time, width = x.shape
        qkv = self.in_proj(x).view(batch, time, 3, self.n_head, self.d_head).permute(2, 0, 3, 1, 4)
        query, key, value = qkv[0], qkv[1], qkv[2]
        scores = query @ key.transpose(-2, -1) / self.d_head ** 0.5

        blocked = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        if padding_mask is not None:
            blocked = blocked | padding_mask[:, None, None, :]
        scores = scores.masked_fill(blocked, torch.finfo(scores.dtype).min / 2)

        weights = self.dropout(softmax_one(scores))
        out = (weights @ value).transpose(1, 2).reshape(batch, time, width)
        return self.out_proj(out)
