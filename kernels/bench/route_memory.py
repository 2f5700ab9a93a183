#!/usr/bin/env python3
"""Device memory of a layer's delta rule by where q and k are normalised: kept between forward and
backward, and at the peak of both, as torch's allocator counts them.

The layer has the convolution's output, q|k [T, 2 H, K] and v, as tensors that nothing else keeps, as
where the convolution's backward computes them again. `caller`: gdn_l2_norm before the rule, whose
output and rstd stay for its backward. `kernel`: the rule normalises. `copied`: q and k are split off
and copied to the HV value heads before the rule, as stacks do whose rule knows no shared heads;
otherwise the rule reads q and k where they lie. o, which the layer's next op keeps, counts as kept; a
caller's raw q|k stays until its rule's forward has ended.

Needs torch and a GPU. usage: route_memory.py LIBRARY [--tokens=131072] [--heads=16:32] [--dim=128]
"""

import argparse
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "..", "tests", "training")]

import torch

from gdn_torch import DeltaRule, L2Norm, Library
from peers_timing import uniform

MIB = 2**20


class Layer:
    """One forward and backward. Sizes in bytes above what the layer's inputs take."""

    def __init__(self, library, tokens, key_heads, value_heads, dim, kernel, copied):
        torch.manual_seed(0)
        self.library, self.key_heads, self.ratio = library, key_heads, value_heads // key_heads
        self.kernel, self.copied, self.norm = kernel, copied, None
        self.cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
        v = uniform(tokens, value_heads, dim)
        g = uniform(tokens, value_heads, low=-0.2, high=0.0, dtype=torch.float32)
        beta = uniform(tokens, value_heads, low=0.0, dtype=torch.float32)
        d_o = uniform(tokens, value_heads, dim)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        qk = uniform(tokens, 2 * key_heads, dim)
        rule = self.forward(qk, v, g, beta) if kernel else self.forward(self.normalise([qk]), v, g, beta)
        del qk
        self.kept = torch.cuda.memory_allocated() - before
        self.d_qk, self.d_v = self.backward(rule, d_o)
        self.peak = torch.cuda.max_memory_allocated() - before

    def normalise(self, raw):
        self.norm = L2Norm(self.library, raw.pop())
        return self.norm.y

    def forward(self, qk, v, g, beta):
        q, k = qk[:, :self.key_heads], qk[:, self.key_heads:]
        if self.copied:
            q, k = (t.repeat_interleave(self.ratio, dim=1) for t in (q, k))
        return DeltaRule(self.library, self.cu_seqlens, q, k, v, g, beta, norm=self.kernel)

    def backward(self, rule, d_o):
        d_q, d_k, d_v, _, _ = rule.backward(d_o)
        if self.copied:
            d_q, d_k = (t.unflatten(1, (self.key_heads, self.ratio)).sum(2) for t in (d_q, d_k))
        d_qk = torch.cat((d_q, d_k), dim=1)
        return (self.norm.backward(d_qk) if self.norm else d_qk), d_v


def main():
    parser = argparse.ArgumentParser(usage=__doc__[__doc__.index("usage:") + 7:])
    parser.add_argument("library")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--heads", type=lambda text: [int(n) for n in text.split(":")], default=[16, 32])
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    library = Library(options.library, "cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, 1x{options.tokens}, "
          f"H:HV {options.heads[0]}:{options.heads[1]}, K = V = {options.dim}, BF16; MiB")
    print(f"{'norm of q and k':28} {'kept':>10} {'peak':>10}   d_qk, d_v apart from the first row's")
    first = None
    for name, kernel, copied in (("kernel", True, False), ("caller", False, False),
                                 ("kernel, heads copied", True, True),
                                 ("caller, heads copied", False, True)):
        layer = Layer(library, options.tokens, *options.heads, options.dim, kernel, copied)
        gradients = [t.cpu() for t in (layer.d_qk, layer.d_v)]
        first = first or gradients
        apart = [((a.float() - b.float()).norm() / b.float().norm()).item()
                 for a, b in zip(gradients, first)]
        print(f"{name:28} {layer.kept / MIB:10.1f} {layer.peak / MIB:10.1f}   "
              + " ".join(f"{x:.1e}" for x in apart))
        del layer


if __name__ == "__main__":
    main()
