import torch
import torch.nn as nn
import torch.nn.functional as F


class TemporalAttention(nn.Module):
    '''
    temporal attention mechanism for traffic forecasting
    X:      [batch_size, num_step, num_vertex, D]
    STE:    [batch_size, num_step, num_vertex, D]
    K:      number of attention heads
    d:      dimension of each attention outputs
    return: [batch_size, num_step, num_vertex, D]
    '''

    def __init__(self, K, d):
        super(TemporalAttention, self).__init__()
        D = K * d
        self.d = d
        self.K = K
        self.FC_q = nn.Linear(2 * D, D)
        self.FC_k = nn.Linear(2 * D, D)
        self.FC_v = nn.Linear(2 * D, D)
        self.FC = nn.Linear(D, D)

    def forward(self, X, STE):
        B, T, N, D = X.shape
        H = torch.cat((X, STE), dim=-1)
        # every vertex is a sequence of its own
        H = H.permute(0, 2, 1, 3).reshape(B * N, T, 2 * D)

        query = F.relu(self.FC_q(H)).view(B * N, T, self.K, self.d).transpose(1, 2)
        key = F.relu(self.FC_k(H)).view(B * N, T, self.K, self.d).transpose(1, 2)
        value = F.relu(self.FC_v(H)).view(B * N, T, self.K, self.d).transpose(1, 2)

        attention = torch.matmul(query, key.transpose(2, 3))
        attention /= (self.d ** 0.5)
        attention = F.softmax(attention, dim=-1)

        out = torch.matmul(attention, value).transpose(1, 2).reshape(B * N, T, D)
        out = self.FC(out).view(B, T, N, D)
        return out
