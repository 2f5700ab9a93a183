#!/usr/bin/env python3
"""Calls the kernel library with ctypes on torch tensors: gated RMSNorm and delta rule, both with their
gradients, held against torch's own gradients of the formulas in FP64.

Runs on the CPU's tensors and on a GPU's. Exits with 77, and says why, if torch or a GPU is missing;
with GDN_REQUIRE_GPU=1 that is a failure.
usage: torch_ops.py LIBRARY
"""

import math
import os
import sys

SKIPPED = 77


def expect_close(what, bound, got, expected):
    error = ((got.double() - expected).norm() / expected.norm()).item()
    print(f"{what:40} relative L2 {error:.2e}, bound {bound:.0e}")
    if not error <= bound:
        sys.exit(f"{what}: relative L2 {error:.3e} exceeds {bound:.0e}")


def leaves_of(*tensors):
    return [tensor.double().requires_grad_() for tensor in tensors]


def test_gated_rms_norm(library, device, new):
    """The gate is a slice of a wider projection, as layers have it."""
    tokens, heads, dim = 300, 4, 128
    x, dy = new(2, tokens, heads, dim), new(2, tokens, heads, dim)
    gate = new(2, tokens, 5152)[..., 3072:3072 + heads * dim].unflatten(-1, (heads, dim))
    gamma = torch.rand(dim, device=device) + 0.5
    norm = GatedRmsNorm(library, x, gate, gamma)
    leaves = leaves_of(x, gate, gamma)
    n = leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + 1e-6) * leaves[2]
    y = n * torch.nn.functional.silu(leaves[1])
    expect_close(f"{device} gated_rms_norm y", 6e-3, norm.y, y.detach())
    expected = torch.autograd.grad(y, leaves, dy.double())
    for name, one, other in zip(("dx", "dgate", "dgamma"), norm.backward(dy), expected):
        expect_close(f"{device} gated_rms_norm {name}", 6e-3, one, other)


def recurrence(q, k, v, g, beta, states, cu_seqlens):
    """The formula, token by token: o and the final states."""
    unit = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    ratio = v.shape[1] // q.shape[1]
    q, k = (unit(t).repeat_interleave(ratio, dim=1) for t in (q, k))
    o, final = [], []
    for state, begin, end in zip(states, cu_seqlens, cu_seqlens[1:]):
        for t in range(begin, end):
            state = state * g[t].exp()[:, None, None]
            u = beta[t][:, None] * (v[t] - (state @ k[t][..., None])[..., 0])
            state = state + u[..., None] * k[t][:, None, :]
            o.append((state @ q[t][..., None])[..., 0] / math.sqrt(q.shape[-1]))
        final.append(state)
    return torch.stack(o), torch.stack(final)


def test_delta_rule(library, device, new):
    cu_seqlens, key_heads, value_heads, dim = [0, 70, 70, 170], 2, 4, 128
    tokens, sequences = cu_seqlens[-1], len(cu_seqlens) - 1
    qkv = new(tokens, (2 * key_heads + value_heads) * dim).unflatten(-1, (-1, dim))
    q, k, v = qkv.split((key_heads, key_heads, value_heads), dim=1)  # strided by token
    g = -torch.rand(tokens, value_heads, device=device) * 0.3
    beta = torch.rand(tokens, value_heads, device=device)
    state = torch.randn(sequences, value_heads, dim, dim, device=device) * 0.1
    d_o, d_state = new(*v.shape), torch.randn(state.shape, device=device) * 0.1
    rule = DeltaRule(library, torch.tensor(cu_seqlens, dtype=torch.int32, device=device), q, k, v, g,
                     beta, state)
    leaves = leaves_of(q, k, v, g, beta, state)
    o, final = recurrence(*leaves, cu_seqlens)
    expect_close(f"{device} delta_rule o", 5e-3, rule.o, o.detach())
    expect_close(f"{device} delta_rule final_state", 5e-3, rule.state, final.detach())
    expected = torch.autograd.grad((o, final), leaves, (d_o.double(), d_state.double()))
    names = ("d_q", "d_k", "d_v", "d_g", "d_beta", "d_initial_state")
    bounds = (8e-3, 8e-3, 8e-3, 2e-2, 2e-2, 8e-3)
    for name, bound, one, other in zip(names, bounds, rule.backward(d_o, d_state), expected):
        expect_close(f"{device} delta_rule {name}", bound, one, other)


def skip(reason):
    required = os.environ.get("GDN_REQUIRE_GPU") == "1"
    print(f"{'failed' if required else 'skipped'}: {reason}"
          f"{', and GDN_REQUIRE_GPU=1' if required else ''}")
    return 1 if required else SKIPPED


def main(path):
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        torch.manual_seed(1)
        new = lambda *shape: torch.randn(*shape, device=device).to(torch.bfloat16)
        for test in (test_gated_rms_norm, test_delta_rule):
            test(Library(path, device), device, new)
    return 0 if "cuda" in devices else skip("torch finds no GPU; its CPU tensors passed")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        import torch
    except ImportError as error:
        sys.exit(skip(f"torch cannot be imported: {error}"))
    from gdn_torch import DeltaRule, GatedRmsNorm, Library
    sys.exit(main(sys.argv[1]))
