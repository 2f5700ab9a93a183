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

from gdn_torch import FusedLayer
from peers_layer import D, H, LayerTensors
from peers_timing import apart, medians, sets_for, uniform

CHAIN = 16  # Calls of a graph at least.
STATE_TYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}


class Step(LayerTensors):
    """A layer's tensors for a batch: what our op takes."""

    def __init__(self, heads, batch, state_type):
        super().__init__(heads, batch, batch, uniform(batch, heads, D, D, dtype=state_type))

    def run(self, library, early):
        args = FusedLayer(tokens=1, early_start=int(early))
        self.fill(args)
        library.run("fused_decode", args)


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
