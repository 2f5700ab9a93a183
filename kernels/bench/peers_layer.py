"""A GDN layer's tensors, bfloat16 but for the states, and how this library's fused ops take them."""

import torch

from gdn_torch import BF16, dtype_of
from peers_timing import uniform

H, D, WIDTH, EPS = 16, 128, 4, 1e-6
KEYS = H * D


class LayerTensors:
    """Of `rows` sequences with `lines` tokens in all; slot i is row i's, in memory order."""

    def __init__(self, heads, rows, lines, state):
        self.heads, self.rows, self.values = heads, rows, heads * D
        self.channels = 2 * KEYS + self.values
        self.line = self.channels + self.values + 2 * heads
        self.x = uniform(lines, self.line)
        self.conv_weight = uniform(self.channels, WIDTH, low=-0.5, high=0.5, dtype=torch.float32)
        self.a_log = uniform(heads, low=0.0, high=2.0, dtype=torch.float32)
        self.dt_bias = uniform(heads, low=-4.0, high=-1.0, dtype=torch.float32)
        self.norm_weight = uniform(D, low=0.5, high=1.5, dtype=torch.float32)
        self.state = state
        self.conv_state = torch.zeros(rows, WIDTH - 1, self.channels, dtype=torch.bfloat16,
                                      device=state.device)
        self.slots = torch.arange(rows, device=state.device)
        self.y = torch.empty(lines, self.values, dtype=torch.bfloat16, device=state.device)

    def fill(self, layer):
        """Sets a FusedLayer's fields but for `tokens` and `early_start`."""
        layer.rows, layer.key_heads, layer.value_heads = self.rows, H, self.heads
        layer.key_dim, layer.value_dim, layer.conv_width = D, D, WIDTH
        layer.dtype, layer.state_dtype = BF16, dtype_of(self.state)
        layer.x_token_stride, layer.y_token_stride = self.line, self.values
        layer.k_offset, layer.v_offset, layer.z_offset = KEYS, 2 * KEYS, self.channels
        layer.b_offset = self.channels + self.values
        layer.a_offset = layer.b_offset + self.heads
        layer.beta_scale, layer.use_qk_l2norm, layer.eps = 1.0, 1, EPS
        layer.state_slot_stride = self.values * D
        layer.conv_slot_stride = (WIDTH - 1) * self.channels
        for name in ("x", "y", "conv_weight", "a_log", "dt_bias", "norm_weight", "state",
                     "conv_state"):
            setattr(layer, name, getattr(self, name).data_ptr())
        layer.read_index = layer.write_index = self.slots.data_ptr()
