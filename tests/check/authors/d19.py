'''Attention with rotary positions on the first part of every head.'''
import torch as th
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, repeat


class PartialRotary(nn.Module):
  def __init__(self, rot_dim, max_len=2048, base=10000.):
    super().__init__()
    assert rot_dim % 2 == 0
    self.rot_dim = rot_dim
    inv = base ** (-th.arange(0, rot_dim, 2) / rot_dim)
    ang = th.arange(max_len)[:, None] * inv[None, :]
    ang = repeat(ang, 't f -> t (f two)', two=2)
    self.register_buffer('cos', ang.cos(), persistent=False)
    self.register_buffer('sin', ang.sin(), persistent=False)

  def forward(self, x, offset=0):
    t = x.shape[-2]
    rot, rest = x[..., :self.rot_dim], x[..., self.rot_dim:]
    pairs = rearrange(rot, '... (f two) -> ... f two', two=2)
    turned = th.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    cos, sin = self.cos[offset:offset + t], self.sin[offset:offset + t]
    return th.cat((rot * cos + turned * sin, rest), -1)


class NeoAttention(nn.Module):
  def __init__(self, width, n_heads, rotary_pct=0.25, dropout=0.):
    super().__init__()
    self.n_heads = n_heads
    self.d = width // n_heads
    self.dropout = dropout
    self.rotary = PartialRotary(int(self.d * rotary_pct) // 2 * 2)
    self.query = nn.Linear(width, width)
    self.key_value = nn.Linear(width, 2 * width)
    self.dense = nn.Linear(width, width)

  def forward(self, x, layer_past=None):
    q = rearrange(self.query(x), 'b t (h d) -> b h t d', h=self.n_heads)
    kv = rearrange(self.key_value(x), 'b t (two h d) -> two b h t d', two=2, h=self.n_heads)

    past = 0 if layer_past is None else layer_past.shape[-2]
    q = self.rotary(q, past)
    kv = self.rotary(kv, past)
    if layer_past is not None:
      kv = th.cat((layer_past, kv), dim=-2)
    k, v = kv

    T, S = q.shape[-2], k.shape[-2]
    mask = th.arange(S, device=x.device) <= th.arange(past, S, device=x.device)[:, None]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask,
                                       dropout_p=self.dropout if self.training else 0.)
    return self.dense(rearrange(y, 'b h t d -> b t (h d)')), kv


if __name__ == '__main__':
  net = NeoAttention(128, 4, rotary_pct=0.5)
  y, past = net(th.randn(2, 9, 128))
  y, past = net(th.randn(2, 2, 128), past)
  print(y.shape, past.shape)
