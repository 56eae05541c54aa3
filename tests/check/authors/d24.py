# teaching version: one small module per head
import torch
import torch.nn as nn


class Head(nn.Module):
    """One attention head, n_embd -> head_size."""

    def __init__(self, n_embd, head_size, block_size, dropout):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)
        self.head_size = head_size

    def forward(self, x):
        T = x.shape[1]
        k = self.key(x)
        q = self.query(x)
        wei = q @ k.transpose(1, 2) / self.head_size ** 0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = self.dropout(torch.softmax(wei, dim=-1))
        return wei @ self.value(x)


class MultiHead(nn.Module):
    """Runs the heads side by side and mixes their outputs."""

    def __init__(self, n_embd, n_head, block_size=256, dropout=0.0):
        super().__init__()
        head_size = n_embd // n_head
        self.heads = [Head(n_embd, head_size, block_size, dropout) for _ in range(n_head)]
        self.proj = nn.Linear(head_size * n_head, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        out = torch.cat([head(x) for head in self.heads], dim=-1)
        return self.dropout(self.proj(out))


class FeedForward(nn.Module):
    def __init__(self, n_embd, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd),
            nn.ReLU(),
            nn.Linear(4 * n_embd, n_embd),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


if __name__ == "__main__":
    mh = MultiHead(32, 4)
    opt = torch.optim.AdamW(mh.parameters(), lr=1e-2)
    x, y = torch.randn(4, 10, 32), torch.randn(4, 10, 32)
    for step in range(20):
        loss = (mh(x) - y).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(float(loss))
