import torch
import torch.nn as nn


class SeriesSplit(nn.Module):
    """x -> (season, trend), with season + trend == x."""

    def __init__(self, kernel):
        super().__init__()
        self.pad = nn.ReplicationPad1d(((kernel - 1) // 2, kernel // 2))
        self.pool = nn.AvgPool1d(kernel, stride=1)

    def forward(self, x):
        trend = self.pool(self.pad(x.transpose(1, 2))).transpose(1, 2)
        return x - trend, trend


class SeasonalEncoderLayer(nn.Module):
    """
    Encoder layer that keeps trend and season apart. Attention refines the
    season, a small network refines the trend, and the layer returns the sum
    of the two refined parts: with both branches at zero the layer is the
    identity.

    Shapes: [batch, length, d_model] in and out.
    """

    def __init__(self, d_model=64, n_heads=4, kernel=25, dropout=0.05):
        super().__init__()
        self.split = SeriesSplit(kernel)
        self.norm = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, n_heads, dropout=dropout, batch_first=True)
        self.trend_net = nn.Sequential(
            nn.Linear(d_model, d_model), nn.Tanh(), nn.Linear(d_model, d_model)
        )
        self.drop = nn.Dropout(dropout)
        nn.init.zeros_(self.trend_net[-1].weight)
        nn.init.zeros_(self.trend_net[-1].bias)

    def refine_season(self, season):
        y = self.norm(season)
        y, _ = self.attn(y, y, y, need_weights=False)
        return self.drop(y)

    def refine_trend(self, trend):
        return self.drop(self.trend_net(trend))

    def forward(self, x):
        season, trend = self.split(x)
        season = x + self.refine_season(season)
        trend = trend + self.refine_trend(trend)
        return season + trend


if __name__ == "__main__":
    layer = SeasonalEncoderLayer().eval()
    print(layer(torch.randn(2, 96, 64)).shape)
