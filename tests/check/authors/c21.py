import torch
import torch.nn as nn


class TargetAttentionPooling(nn.Module):
    """User interest with respect to a candidate item.

    The history is padded at the end to a fixed length; only clicked items may
    contribute. Scores come from a small MLP on [item, target, item - target,
    item * target].
    """

    def __init__(self, emb_dim, hidden=(64, 16)):
        super().__init__()
        layers, size = [], 4 * emb_dim
        for width in hidden:
            layers += [nn.Linear(size, width), nn.PReLU()]
            size = width
        layers.append(nn.Linear(size, 1))
        self.scorer = nn.Sequential(*layers)

    def forward(self, target, history, hist_len):
        """
        target:   [batch, emb]
        history:  [batch, max_len, emb]
        hist_len: [batch], at least 1
        """
        max_len = history.size(1)
        tgt = target.unsqueeze(1).expand_as(history)
        feats = torch.cat([history, tgt, history - tgt, history * tgt], dim=-1)
        scores = self.scorer(feats).squeeze(-1)

        steps = torch.arange(max_len, device=history.device)
        clicked = steps.unsqueeze(0) < hist_len.unsqueeze(1)
        scores = scores.masked_fill(~clicked, 0.0)
        weights = torch.softmax(scores, dim=1)

        return torch.bmm(weights.unsqueeze(1), history).squeeze(1)


class CtrModel(nn.Module):
    def __init__(self, n_items, emb_dim=32):
        super().__init__()
        self.items = nn.Embedding(n_items, emb_dim)
        self.interest = TargetAttentionPooling(emb_dim)
        self.head = nn.Sequential(nn.Linear(2 * emb_dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, target_id, hist_ids, hist_len):
        t, h = self.items(target_id), self.items(hist_ids)
        user = self.interest(t, h, hist_len)
        return self.head(torch.cat([t, user], dim=-1)).squeeze(-1)


if __name__ == "__main__":
    net = CtrModel(1000)
    logit = net(torch.randint(0, 1000, (8,)), torch.randint(0, 1000, (8, 20)), torch.randint(1, 21, (8,)))
    print(logit.shape)
