import torch
import torch.nn as nn


class CaptionCrossAttention(nn.Module):
    """Word tokens look at image patches; bmm style with folded heads."""

    def __init__(self, word_dim, image_dim, heads=8, p=0.1):
        super().__init__()
        self.heads = heads
        self.hd = word_dim // heads
        self.q_lin = nn.Linear(word_dim, word_dim)
        self.k_lin = nn.Linear(image_dim, word_dim)
        self.v_lin = nn.Linear(image_dim, word_dim)
        self.o_lin = nn.Linear(word_dim, word_dim)
        self.drop = nn.Dropout(p)

    def _fold(self, t, n, length):
        t = t.view(n, length, self.heads, self.hd)
        return t.permute(0, 2, 1, 3).reshape(n * self.heads, length, self.hd)

    def forward(self, words, patches):
        n, length, dim = words.shape
        q = self._fold(self.q_lin(words), n, length)
        k = self._fold(self.k_lin(patches), n, length)
        v = self._fold(self.v_lin(patches), n, length)

        w = torch.bmm(q, k.transpose(1, 2)).div(self.hd ** 0.5)
        w = self.drop(w.softmax(-1))
        o = torch.bmm(w, v).view(n, self.heads, length, self.hd)
        o = o.permute(0, 2, 1, 3).reshape(n, length, dim)
        return self.o_lin(o)


def _smoke():
    m = CaptionCrossAttention(64, 48)
    assert m(torch.rand(2, 16, 64), torch.rand(2, 16, 48)).shape == (2, 16, 64)


if __name__ == "__main__":
    _smoke()
