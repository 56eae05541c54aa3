import torch
import torch.nn as nn


class UtteranceAttention(nn.Module):
    """self attention over a padded batch of utterances

    feats    B x T x F
    n_frames B  (number of valid frames of each utterance)
    """

    def __init__(self, n_feat, n_head, p_drop=0.1):
        super().__init__()
        self.n_head = n_head
        self.d_head = n_feat // n_head
        self.fc_q = nn.Linear(n_feat, n_feat)
        self.fc_k = nn.Linear(n_feat, n_feat)
        self.fc_v = nn.Linear(n_feat, n_feat)
        self.fc_o = nn.Linear(n_feat, n_feat)
        self.norm = nn.LayerNorm(n_feat)
        self.drop = nn.Dropout(p_drop)

    def heads(self, x):
        b, t, _ = x.shape
        return x.view(b, t, self.n_head, self.d_head).permute(0, 2, 1, 3)

    def forward(self, feats, n_frames):
        b, t, f = feats.shape
        steps = torch.arange(t, device=feats.device)
        valid = steps.unsqueeze(0) <= n_frames.unsqueeze(1)

        h = self.norm(feats)
        q, k, v = self.heads(self.fc_q(h)), self.heads(self.fc_k(h)), self.heads(self.fc_v(h))
        e = q @ k.transpose(-1, -2) / self.d_head ** 0.5
        e = e.masked_fill(~valid[:, None, None, :], float('-inf'))
        a = self.drop(e.softmax(-1))
        c = (a @ v).permute(0, 2, 1, 3).reshape(b, t, f)
        return feats + self.drop(self.fc_o(c))
