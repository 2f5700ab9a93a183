"""The kernel library's training ops and fused prefill on torch tensors, through ctypes.

The structures are those of kernels/include/gdn/kernels, field by field; the classes show how autograd
functions would call the ops.
"""

import ctypes as c

import torch

F32, BF16 = 0, 1
CPU, CUDA = 1, 2


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


class L2NormForward(c.Structure):
    _fields_ = [*extents("rows", "dim"), *pointers("x"), ("x_dtype", c.c_int), *extents("x_row_stride"),
                *pointers("y"), ("y_dtype", c.c_int), *extents("y_row_stride"), *pointers("rstd"),
                ("eps", c.c_float), ("scale", c.c_float),
                *extents("group_rows", "x_group_stride", "y_group_stride")]


class L2NormBackward(c.Structure):
    _fields_ = [*extents("rows", "dim"), *pointers("y"), ("y_dtype", c.c_int), *extents("y_row_stride"),
                *pointers("rstd", "dy"), ("dy_dtype", c.c_int), *extents("dy_row_stride"),
                *pointers("dx"), ("dx_dtype", c.c_int), *extents("dx_row_stride"), ("scale", c.c_float)]


class FusedLayer(c.Structure):
    """gdn_fused_decode_args."""
    _fields_ = [*extents("rows", "tokens", "key_heads", "value_heads", "key_dim", "value_dim",
                         "conv_width"),
                *pointers("x"), ("dtype", c.c_int),
                *extents("x_token_stride", "q_offset", "k_offset", "v_offset", "z_offset", "b_offset",
                         "a_offset"),
                *pointers("conv_weight", "a_log", "dt_bias"), ("beta_scale", c.c_float),
                ("scale", c.c_float), ("use_qk_l2norm", c.c_int32), *pointers("norm_weight"),
                ("zero_centered", c.c_int32), ("activation", c.c_int), ("round_o", c.c_int32),
                ("round_before_gate", c.c_int32), ("eps", c.c_float), *pointers("state"),
                ("state_dtype", c.c_int), *extents("state_slot_stride"), *pointers("conv_state"),
                *extents("conv_slot_stride"), *pointers("read_index", "write_index", "fresh", "y"),
                *extents("y_token_stride"), ("early_start", c.c_int32)]


class FusedPrefill(c.Structure):
    _fields_ = [*extents("tokens"), *pointers("cu_seqlens"), ("layer", FusedLayer),
                *extents("checkpoint_every"), *pointers("checkpoint_begin", "checkpoint_slots")]


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


def address_of(tensor):
    return None if tensor is None else tensor.data_ptr()


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


class L2Norm:
    """y = x / sqrt(sum(x^2) + eps) of the rows of a dense tensor."""

    def __init__(self, library, x, eps=1e-6):
        self.library, self.dim, self.rows = library, x.shape[-1], x.numel() // x.shape[-1]
        self.y = torch.empty_like(x)
        self.rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        library.run("l2_norm", L2NormForward(
            self.rows, self.dim, x.data_ptr(), dtype_of(x), self.dim, self.y.data_ptr(),
            dtype_of(self.y), self.dim, self.rstd.data_ptr(), eps, 1.0))

    def backward(self, dy):
        """dx, in place of dy."""
        self.library.run("l2_norm_backward", L2NormBackward(
            self.rows, self.dim, self.y.data_ptr(), dtype_of(self.y), self.dim, self.rstd.data_ptr(),
            dy.data_ptr(), dtype_of(dy), self.dim, dy.data_ptr(), dtype_of(dy), self.dim, 1.0))
        return dy


class DeltaRule:
    """The gated delta rule of packed sequences, q and k normalised in the kernel or (norm=False) before.

    q, k [T, H, K] and v [T, HV, V] of one type; g, beta [T, HV] and states [N, HV, V, K] FP32. Without
    an initial state it is zeros, the final one is not kept, and neither has a gradient.
    """

    def __init__(self, library, cu_seqlens, q, k, v, g, beta, state=None, norm=True):
        self.library, self.norm, self.kept = library, int(norm), (v, g, beta)
        self.cu_seqlens, self.initial_state = cu_seqlens, state
        empty = lambda like, dtype: torch.empty(like.shape, dtype=dtype, device=like.device)
        self.o = empty(v, v.dtype)
        self.state = None if state is None else empty(state, torch.float32)
        args = RuleForward(o=self.o.data_ptr(), o_dtype=dtype_of(self.o),
                           o_token_stride=self.o.stride(0), final_state=address_of(self.state))
        # What the backward reads: of raw q and k only their normalised values.
        self.q_hat, self.k_hat, self.q_rstd, self.k_rstd = q, k, None, None
        if norm:
            self.q_hat, self.k_hat = empty(q, q.dtype), empty(k, k.dtype)
            self.q_rstd, self.k_rstd = (empty(t[..., 0], torch.float32) for t in (q, k))
            args.q_hat, args.k_hat = self.q_hat.data_ptr(), self.k_hat.data_ptr()
        self.describe(args, q, k)
        library.run("delta_rule_forward", args)

    def describe(self, args, q, k):
        """What forward and backward have in common."""
        v, g, beta = self.kept
        args.use_qk_l2norm = self.norm
        args.sequences, args.cu_seqlens = len(self.cu_seqlens) - 1, self.cu_seqlens.data_ptr()
        (_, args.key_heads, args.key_dim), (_, args.value_heads, args.value_dim) = q.shape, v.shape
        args.q, args.k, args.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        args.qkv_dtype = dtype_of(q)
        args.q_token_stride, args.k_token_stride, args.v_token_stride = (
            t.stride(0) for t in (q, k, v))
        args.g, args.beta = g.data_ptr(), beta.data_ptr()
        args.initial_state = address_of(self.initial_state)
        args.q_rstd, args.k_rstd = address_of(self.q_rstd), address_of(self.k_rstd)

    def backward(self, d_o, d_state=None):
        """d_q, d_k, d_v, d_g, d_beta and, if there is an initial state, d_initial_state."""
        inputs = (self.q_hat, self.k_hat, *self.kept)
        if self.initial_state is not None:
            inputs += (self.initial_state,)
        gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs]
        names = ("d_q", "d_k", "d_v", "d_g", "d_beta", "d_initial_state")
        args = RuleBackward(tokens=d_o.shape[0], d_o=d_o.data_ptr(),
                            d_o_dtype=dtype_of(d_o), d_o_token_stride=d_o.stride(0),
                            d_final_state=address_of(d_state), d_qkv_dtype=dtype_of(gradients[0]),
                            **{name: t.data_ptr() for name, t in zip(names, gradients)})
        self.describe(args, self.q_hat, self.k_hat)
        args.d_q_token_stride, args.d_k_token_stride, args.d_v_token_stride = (
            t.stride(0) for t in gradients[:3])
        self.library.run("delta_rule_backward", args)
        return gradients
