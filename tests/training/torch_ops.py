#!/usr/bin/env python3
"""Calls the kernel library with ctypes on torch tensors: gated RMSNorm and delta rule, both with their
gradients, held against torch's own gradients of the formulas in FP64.

Runs on the CPU's tensors and on a GPU's. Exits with 77, and says why, if torch or a GPU is missing;
with GDN_REQUIRE_GPU=1 that is a failure.
usage: torch_ops.py LIBRARY
"""

import ctypes as c
import math
import os
import sys

F32, BF16 = 0, 1
CPU, CUDA = 1, 2
SKIPPED = 77


def pointers(*names):
    return [(name, c.c_void_p) for name in names]


def extents(*names):
    return [(name, c.c_int64) for name in names]


class Exec(c.Structure):
    _fields_ = [("backend", c.c_int), *pointers("pool", "workspace"), ("workspace_bytes", c.c_size_t),
                *pointers("stream")]


class Strides(c.Structure):
    _fields_ = extents("batch", "seq", "head", "element")


class NormInput(c.Structure):
    _fields_ = [*extents("batch", "seq", "heads", "dim"), *pointers("x"), ("x_dtype", c.c_int),
                ("x_strides", Strides), *pointers("gate"), ("gate_dtype", c.c_int),
                ("gate_strides", Strides), *pointers("gamma"), ("gamma_dtype", c.c_int),
                ("zero_centered_gamma", c.c_int32), ("activation", c.c_int)]


class NormForward(c.Structure):
    _fields_ = [("input", NormInput), ("eps", c.c_float), *pointers("y", "rstd"), ("fp8", c.c_int),
                *pointers("fp8_scale", "fp8_scale_inv", "amax")]


class NormBackward(c.Structure):
    _fields_ = [("input", NormInput), *pointers("rstd", "dy"), ("dy_strides", Strides),
                *pointers("dx", "dgate", "dgamma")]


class RuleForward(c.Structure):
    _fields_ = [*extents("sequences"), *pointers("cu_seqlens"),
                *extents("key_heads", "value_heads", "key_dim", "value_dim"),
                *pointers("q", "k", "v"), ("qkv_dtype", c.c_int),
                *extents("q_token_stride", "k_token_stride", "v_token_stride"),
                *pointers("g", "beta"), ("scale", c.c_float), ("use_qk_l2norm", c.c_int32),
                *pointers("initial_state", "o"), ("o_dtype", c.c_int), *extents("o_token_stride"),
                *pointers("final_state", "q_hat", "k_hat", "q_rstd", "k_rstd")]


class RuleBackward(c.Structure):
    _fields_ = [*extents("tokens", "sequences"), *pointers("cu_seqlens"),
                *extents("key_heads", "value_heads", "key_dim", "value_dim"),
                *pointers("q", "k", "q_rstd", "k_rstd", "v"), ("qkv_dtype", c.c_int),
                *extents("q_token_stride", "k_token_stride", "v_token_stride"),
                *pointers("g", "beta"), ("scale", c.c_float), ("use_qk_l2norm", c.c_int32),
                *pointers("initial_state", "d_o"), ("d_o_dtype", c.c_int),
                *extents("d_o_token_stride"), *pointers("d_final_state", "d_q", "d_k", "d_v"),
                ("d_qkv_dtype", c.c_int),
                *extents("d_q_token_stride", "d_k_token_stride", "d_v_token_stride"),
                *pointers("d_g", "d_beta", "d_initial_state")]


class Library:
    """Calls ops where the tensors of one torch device lie, on torch's current stream."""

    def __init__(self, path, device):
        self.lib = c.CDLL(path)
        self.lib.gdn_last_error.restype = c.c_char_p
        self.device = device

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.gdn_last_error().decode())

    def run(self, op, args):
        """Calls gdn_<op>, with the scratch memory that it asks for, if it asks for any."""
        gpu = self.device == "cuda"
        run = Exec(backend=CUDA if gpu else CPU,
                   stream=torch.cuda.current_stream().cuda_stream if gpu else None)
        scratch = None
        if hasattr(self.lib, f"gdn_{op}_workspace"):
            size = c.c_size_t()
            query = getattr(self.lib, f"gdn_{op}_workspace")
            self.check(query(c.byref(run), c.byref(args), c.byref(size)))
            # torch's allocator gives multiples of 512 bytes on a GPU, and of 64 on the CPU.
            scratch = torch.empty(size.value, dtype=torch.uint8, device=self.device)
            run.workspace = scratch.data_ptr()
            run.workspace_bytes = size.value
        self.check(getattr(self.lib, f"gdn_{op}")(c.byref(run), c.byref(args)))
        # Freed scratch returns to the stream's pool: a later use of it waits for the op.


def dtype_of(tensor):
    return {torch.float32: F32, torch.bfloat16: BF16}[tensor.dtype]


def rows_of(tensor):
    """The strides of [batch, seq, heads, dim]."""
    return Strides(*tensor.stride())


class GatedRmsNorm:
    """y = RMSNorm(x) * SiLU(gate) of strided [batch, seq, heads, dim] tensors."""

    def __init__(self, library, x, gate, gamma, eps=1e-6):
        self.library, self.kept = library, (x, gate, gamma)
        self.input = NormInput(*x.shape, x.data_ptr(), dtype_of(x), rows_of(x), gate.data_ptr(),
                               dtype_of(gate), rows_of(gate), gamma.data_ptr(), dtype_of(gamma), 0, 0)
        self.rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        self.y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        library.run("gated_rms_norm_forward",
                    NormForward(self.input, eps, self.y.data_ptr(), self.rstd.data_ptr()))

    def backward(self, dy):
        gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in self.kept]
        self.library.run("gated_rms_norm_backward",
                         NormBackward(self.input, self.rstd.data_ptr(), dy.data_ptr(), rows_of(dy),
                                      *(t.data_ptr() for t in gradients)))
        return gradients


class DeltaRule:
    """The gated delta rule of packed sequences, q and k normalised in the kernel.

    q, k [T, H, K] and v [T, HV, V] of one type; g, beta [T, HV] and states [N, HV, V, K] FP32.
    """

    def __init__(self, library, cu_seqlens, q, k, v, g, beta, state):
        self.library, self.kept = library, (q, k, v, g, beta, state)
        self.cu_seqlens = cu_seqlens
        empty = lambda like, dtype: torch.empty(like.shape, dtype=dtype, device=like.device)
        self.o, self.state = empty(v, v.dtype), empty(state, torch.float32)
        self.q_hat, self.k_hat = empty(q, q.dtype), empty(k, k.dtype)
        self.q_rstd, self.k_rstd = (empty(t[..., 0], torch.float32) for t in (q, k))
        args = RuleForward(use_qk_l2norm=1, o=self.o.data_ptr(), o_dtype=dtype_of(self.o),
                           o_token_stride=self.o.stride(0), final_state=self.state.data_ptr(),
                           q_hat=self.q_hat.data_ptr(), k_hat=self.k_hat.data_ptr())
        self.describe(args, q, k)
        library.run("delta_rule_forward", args)

    def describe(self, args, q, k):
        """What forward and backward have in common."""
        _, _, v, g, beta, state = self.kept
        args.sequences, args.cu_seqlens = state.shape[0], self.cu_seqlens.data_ptr()
        (_, args.key_heads, args.key_dim), (_, args.value_heads, args.value_dim) = q.shape, v.shape
        args.q, args.k, args.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        args.qkv_dtype = dtype_of(q)
        args.q_token_stride, args.k_token_stride, args.v_token_stride = (
            t.stride(0) for t in (q, k, v))
        args.g, args.beta, args.initial_state = g.data_ptr(), beta.data_ptr(), state.data_ptr()
        args.q_rstd, args.k_rstd = self.q_rstd.data_ptr(), self.k_rstd.data_ptr()

    def backward(self, d_o, d_state):
        gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in self.kept]
        names = ("d_q", "d_k", "d_v", "d_g", "d_beta", "d_initial_state")
        args = RuleBackward(tokens=d_o.shape[0], use_qk_l2norm=1, d_o=d_o.data_ptr(),
                            d_o_dtype=dtype_of(d_o), d_o_token_stride=d_o.stride(0),
                            d_final_state=d_state.data_ptr(), d_qkv_dtype=dtype_of(gradients[0]),
                            **{name: t.data_ptr() for name, t in zip(names, gradients)})
        self.describe(args, self.q_hat, self.k_hat)
        args.d_q_token_stride, args.d_k_token_stride, args.d_v_token_stride = (
            t.stride(0) for t in gradients[:3])
        self.library.run("delta_rule_backward", args)
        return gradients


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
    sys.exit(main(sys.argv[1]))
