"""The decode table of peers_bench.py: one token of each row of a batch, K = V = 128, H 16, bfloat16.

  ours        gdn_fused_decode: convolution and its state, slots, SiLU, norms of q and k, gates, rule,
              gated norm; `early`: with early_start, as a step's layers are launched. Slots in memory
              order, which is the only order that the others know.
  SGLang      its decode kernel, state [V, K] in place: gates, norms of q and k, rule
  FLA         fused_recurrent_gated_delta_rule with gates and norms in the kernel, into a new state,
              which is FP32: `[K, V]`, its default, and `[V, K]`. `in place`: its kernel launched with
              the state as its own result, which the function does not offer.

Before timing, the states that all leave are compared with ours.
"""

import importlib.util
import sys

import torch
import torch.nn.functional as F
from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd_kernel

from gdn_torch import BF16, FusedLayer, dtype_of
from peers_timing import apart, medians, sets_for, uniform

H, D, WIDTH, EPS = 16, 128, 4, 1e-6
KEYS = H * D
CHAIN = 16  # Calls of a graph at least.
STATE_TYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}


class Step:
    """A layer's tensors for a batch: what our op takes."""

    def __init__(self, heads, batch, state_type):
        self.heads, self.batch = heads, batch
        values = heads * D
        self.channels = 2 * KEYS + values
        self.line = self.channels + values + 2 * heads
        self.x = uniform(batch, self.line)
        self.conv_weight = uniform(self.channels, WIDTH, low=-0.5, high=0.5, dtype=torch.float32)
        self.a_log = uniform(heads, low=0.0, high=2.0, dtype=torch.float32)
        self.dt_bias = uniform(heads, low=-4.0, high=-1.0, dtype=torch.float32)
        self.norm_weight = uniform(D, low=0.5, high=1.5, dtype=torch.float32)
        self.state = uniform(batch, heads, D, D, dtype=state_type)
        self.conv_state = torch.zeros(batch, WIDTH - 1, self.channels, dtype=torch.bfloat16,
                                      device="cuda")
        self.slots = torch.arange(batch, device="cuda")
        self.y = torch.empty(batch, values, dtype=torch.bfloat16, device="cuda")

    def run(self, library, early):
        a = FusedLayer(rows=self.batch, tokens=1, key_heads=H, value_heads=self.heads, key_dim=D,
                       value_dim=D, conv_width=WIDTH, dtype=BF16, state_dtype=dtype_of(self.state))
        values = self.heads * D
        a.x_token_stride, a.y_token_stride = self.line, values
        a.k_offset, a.v_offset, a.z_offset = KEYS, 2 * KEYS, self.channels
        a.b_offset, a.a_offset = self.channels + values, self.channels + values + self.heads
        a.beta_scale, a.use_qk_l2norm, a.eps, a.early_start = 1.0, 1, EPS, int(early)
        a.state_slot_stride, a.conv_slot_stride = values * D, (WIDTH - 1) * self.channels
        for name in ("x", "y", "conv_weight", "a_log", "dt_bias", "norm_weight", "state",
                     "conv_state"):
            setattr(a, name, getattr(self, name).data_ptr())
        a.read_index = a.write_index = self.slots.data_ptr()
        library.run("fused_decode", a)


class Token:
    """The same for the others: q, k and v as the convolution leaves them, raw gates."""

    def __init__(self, step):
        # A first token: the convolution's state is zeros.
        qkv = F.silu(step.x[:, :step.channels].float() * step.conv_weight[:, -1]).bfloat16()
        split = qkv.unflatten(1, (-1, D))[:, None].split((H, H, step.heads), dim=2)
        self.q, self.k, self.v = (t.contiguous() for t in split)
        gates = step.x[:, None, step.channels + step.heads * D:].split(step.heads, dim=2)
        self.b, self.a = (t.contiguous() for t in gates)
        self.a_log, self.dt_bias, self.state = step.a_log, step.dt_bias, step.state.clone()
        self.o = torch.empty_like(self.v)

    def sglang(self, module):
        return module.triton_gdn_decode_pretranspose(
            self.q, self.k, self.v, self.state, self.a_log, self.a, self.dt_bias, self.b, D**-0.5,
            self.o)

    def fla(self, state_v_first):
        return fused_recurrent_gated_delta_rule(
            self.q, self.k, self.v, g=self.a, beta=self.b, initial_state=self.state,
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            A_log=self.a_log, dt_bias=self.dt_bias, use_beta_sigmoid_in_kernel=True,
            state_v_first=state_v_first)

    def fla_in_place(self):
        batch, heads = self.state.shape[:2]
        columns = 8
        fused_recurrent_gated_delta_rule_fwd_kernel[(D // columns * batch * heads,)](
            q=self.q, k=self.k, v=self.v, g=self.a, gk=None, gv=None, beta=self.b, A_log=self.a_log,
            dt_bias=self.dt_bias, o=self.o, h0=self.state, ht=self.state, cu_seqlens=None,
            scale=D**-0.5, T=1, H=H, HV=heads, K=D, V=D, BK=D, BV=columns, IS_BETA_HEADWISE=True,
            USE_QK_L2NORM_IN_KERNEL=True, APPLY_BETA_SIGMOID=True, ALLOW_NEG_EIGVAL=False,
            STATE_V_FIRST=True, num_warps=1, num_stages=3)


def load(path):
    spec = importlib.util.spec_from_file_location("gdn_triton_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def others_of(module):
    """The peers' calls on a Token."""
    calls = {"FLA [K, V]": lambda t: t.fla(False), "FLA [V, K]": lambda t: t.fla(True),
             "FLA in place": Token.fla_in_place}
    if module is not None:
        calls["SGLang"] = lambda t: t.sglang(module)
    return calls


def compare(library, module, state_type):
    step = Step(32, 5, state_type)
    tokens = {name: Token(step) for name in others_of(module)}
    before = step.state.clone()
    step.run(library, False)
    change = (step.state.float() - before.float()).norm() / before.float().norm()
    print(f"  ours changes the states by {change.item():.2f}; apart:", end="")
    for name, call in others_of(module).items():
        token = tokens[name]
        if name == "FLA [K, V]":
            token.state = token.state.transpose(-1, -2).contiguous()
        result = call(token)
        after = result[1] if name.startswith("FLA [") else token.state
        error = apart(after.transpose(-1, -2) if name == "FLA [K, V]" else after, step.state)
        print(f" {name} {error:.1e}", end="")
        if not error < 1e-2:
            sys.exit(f"\ndecode: the states of {name} and ours differ by more than 1e-2")
    print(flush=True)


def table(library, cases, replays, sglang=None):
    module = load(sglang) if sglang else None
    for name, state_type in STATE_TYPES.items():
        others = others_of(module)
        print(f"\ndecode, {name} state, H {H}; us")
        compare(library, module, state_type)
        columns = ("ours", "ours, early", *others)
        print(" HV batch " + " ".join(f"{column:>12}" for column in columns), flush=True)
        for heads, batch in cases:
            bytes_ = batch * heads * D * D * state_type.itemsize
            # An early start needs a layer before that is another's, and a chain long enough to count.
            n = max(2, sets_for(bytes_, most=450))
            steps = [Step(heads, batch, state_type) for _ in range(n)]
            tokens = [Token(step) for step in steps]
            turns = -(-CHAIN // n)
            steps, tokens = steps * turns, tokens * turns
            calls = {"ours": [lambda s=s: s.run(library, False) for s in steps],
                     "ours, early": [lambda s=s: s.run(library, True) for s in steps]}
            for other, call in others.items():
                calls[other] = [lambda t=t, call=call: call(t) for t in tokens]
            ms = medians(calls, replays)
            print(f"{heads:>3} {batch:>5} " + " ".join(f"{1e3 * ms[c]:>12.2f}" for c in columns),
                  flush=True)


def compile_kernels(cases, sglang):
    """Launches what the cases launch, once each; at the case's size, which is compiled in."""
    module = load(sglang) if sglang else None
    for state_type in STATE_TYPES.values():
        for heads, batch in cases:
            token = Token(Step(heads, batch, state_type))
            for call in others_of(module).values():
                call(token)
    torch.cuda.synchronize()
