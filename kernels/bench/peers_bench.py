#!/usr/bin/env python3
"""This library beside flash-linear-attention (FLA), and where named SGLang's kernel, on one GPU, in one
process, on tensors of the same values and sizes: the prefill of a layer, a decode step, training the
delta rule, the gated norm.

Times are medians over replays of CUDA graphs, ours and FLA's in turn. A graph holds calls on as many
sets of tensors as exceed four times the L2 (training, whose tensors are larger, on one), so that each
call finds it cold. What both compute is compared (`apart`: relative L2 of theirs to ours): of the
prefill once before, with a bound, of the others after each case.

  prefill   gdn_fused_prefill, the whole layer (convolution, norms, gates, rule, gated norm), beside
            FLA's chunk_gated_delta_rule, which is the rule alone with the norm of q and k; H 16,
            HV 32 without copies of q and k, initial state in and final state out, FP32
  training  gdn_delta_rule_forward and _backward beside FLA's forward and autograd's backward
  norm      gdn_gated_rms_norm_forward and _backward beside the kernels of FLA's FusedRMSNormGated
  decode    gdn_fused_decode beside FLA's fused_recurrent_gated_delta_rule and SGLang's decode kernel:
            see peers_decode.py; --sglang=FILE is FlashInfer's benchmarks/gdn_triton_reference.py

FLA (`fla`), torch and Triton must be importable. Triton compiles for minutes: --processes=N compiles
first, in N processes, into TRITON_CACHE_DIR.

usage: peers_bench.py LIBRARY [--tables=prefill,training,norm,decode] [--prefill=1x1024,...]
       [--training=8x4096,...] [--norm=ROWSxDIM,...] [--decode=HVxBATCH,...] [--sglang=FILE]
       [--replays=20] [--processes=0]
"""

import argparse
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "..", "tests", "training")]

import torch
import torch.nn.functional as F

import peers_fla
import peers_decode
from gdn_torch import DeltaRule, FusedPrefill, GatedRmsNorm, Library
from peers_layer import D, EPS, H, KEYS, WIDTH, LayerTensors
from peers_timing import apart, medians, packed, sets_for, uniform

HV = 32
VALUES = HV * D
CHANNELS = 2 * KEYS + VALUES
LINE = CHANNELS + VALUES + 2 * HV
NORM_ROWS = 65536  # Rows that share a compiled norm of q and k in FLA.


class Layer(LayerTensors):
    """The projections of a layer's packed prompts, its weights and states: what our op takes."""

    def __init__(self, sequences, length):
        tokens = sequences * length
        super().__init__(HV, sequences, tokens, torch.zeros(sequences, HV, D, D, device="cuda"))
        self.sequences, self.tokens = sequences, tokens
        self.cu_seqlens = packed(sequences, length, torch.int32)

    def prefill(self, library):
        args = FusedPrefill(tokens=self.tokens, cu_seqlens=self.cu_seqlens.data_ptr())
        self.fill(args.layer)
        library.run("fused_prefill", args)


class Prompts:
    """The same for FLA's rule: what convolution and gates leave, [1, T, ...]."""

    def __init__(self, sequences, length):
        tokens = sequences * length
        self.q, self.k = uniform(1, tokens, H, D), uniform(1, tokens, H, D)
        self.v = uniform(1, tokens, HV, D)
        self.g = uniform(1, tokens, HV, low=-0.2, high=0.0, dtype=torch.float32)
        self.beta = uniform(1, tokens, HV, low=0.0, high=1.0)
        self.state = torch.zeros(sequences, HV, D, D, device="cuda")

    def prefill(self, cu_seqlens):
        return peers_fla.rule(self.q, self.k, self.v, self.g, self.beta, cu_seqlens, self.state, True)


def prompts_of(layer, length):
    """Convolution and gates in torch: what FLA's rule gets of a Layer."""
    x = layer.x.unflatten(0, (layer.sequences, length))
    qkv = F.conv1d(F.pad(x[..., :CHANNELS].float().transpose(1, 2), (WIDTH - 1, 0)),
                   layer.conv_weight[:, None], groups=CHANNELS)
    qkv = F.silu(qkv).transpose(1, 2).reshape(1, layer.tokens, -1, D).bfloat16()
    prompts = Prompts(layer.sequences, length)
    prompts.q, prompts.k, prompts.v = (t.contiguous() for t in qkv.split((H, H, HV), dim=2))
    b, a = layer.x[None, :, CHANNELS + VALUES:].float().split(HV, dim=2)
    prompts.beta = torch.sigmoid(b)
    prompts.g = -layer.a_log.exp() * F.softplus(a + layer.dt_bias)
    return prompts


def compare_prefill(library, sequences=3, length=300):
    layer = Layer(sequences, length)
    o, state = prompts_of(layer, length).prefill(packed(sequences, length, torch.int64))
    o = o[0].float()
    norm = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS) * layer.norm_weight
    gate = layer.x[:, CHANNELS:CHANNELS + VALUES].float().unflatten(1, (HV, D))
    y = (norm * F.silu(gate)).flatten(1)
    layer.prefill(library)
    errors = {"y": apart(y, layer.y), "state": apart(state.transpose(-1, -2), layer.state)}
    print(f"prefill of {sequences}x{length}, apart: "
          + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
    if not all(error < 2e-2 for error in errors.values()):
        sys.exit("prefill: ours and FLA's differ by more than 2e-2")


def prefill_table(library, cases, replays):
    peers_fla.tune_anew()
    with torch.no_grad():
        compare_prefill(library)
        print(f"\nprefill, H {H}, HV {HV}; ms\n{'case':>9} {'ours, layer':>12} {'FLA, rule':>10} "
              f"{'ratio':>6}")
        for sequences, length in cases:
            peers_fla.tune_anew()
            n = sets_for(2 * sequences * length * (LINE + VALUES) + 4 * sequences * VALUES * D)
            cu_seqlens = packed(sequences, length, torch.int64)
            layers = [Layer(sequences, length) for _ in range(n)]
            prompts = [Prompts(sequences, length) for _ in range(n)]
            ms = medians({"ours": [lambda l=l: l.prefill(library) for l in layers],
                          "FLA": [lambda p=p: p.prefill(cu_seqlens) for p in prompts]}, replays)
            print(f"{sequences:>3}x{length:<5} {ms['ours']:>12.4f} {ms['FLA']:>10.4f} "
                  f"{ms['FLA'] / ms['ours']:>6.2f}", flush=True)


class Lesson:
    """The rule's training tensors, for both."""

    def __init__(self, sequences, length):
        self.prompts = Prompts(sequences, length)
        p = self.prompts
        self.d_o = uniform(*p.v.shape)
        self.cu_seqlens = packed(sequences, length, torch.int64)
        self.leaves = [p.q, p.k, p.v, p.g, p.beta]
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.ours = [t.detach()[0] for t in self.leaves[:4]] + [p.beta.detach()[0].float()]
        self.cu_seqlens_32 = self.cu_seqlens.int()

    def theirs_forward(self):
        return peers_fla.rule(*self.leaves, self.cu_seqlens)[0]

    def theirs_both(self):
        return torch.autograd.grad(self.theirs_forward(), self.leaves, self.d_o)

    def ours_forward(self, library):
        return DeltaRule(library, self.cu_seqlens_32, *self.ours)

    def ours_both(self, library):
        return self.ours_forward(library).backward(self.d_o[0])

    def compare(self, library):
        rule = self.ours_forward(library)
        errors = {"o": apart(self.theirs_forward()[0].detach(), rule.o)}
        for name, theirs, ours in zip(("d_q", "d_k", "d_v", "d_g", "d_beta"), self.theirs_both(),
                                      rule.backward(self.d_o[0])):
            errors[name] = apart(theirs[0], ours)
        print("        apart: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()),
              flush=True)


def training_table(library, cases, replays):
    if peers_fla.allow_backward():
        print("\nFLA refuses its backward with this Triton on this GPU, for wrong results "
              "(its issue 640); called all the same")
    print(f"\ntraining, H {H}, HV {HV}; ms, ours / FLA (ratio); backward: both less forward")
    for sequences, length in cases:
        peers_fla.tune_anew()
        lesson = Lesson(sequences, length)
        ms = medians({"ours forward": [lambda: lesson.ours_forward(library)],
                      "ours both": [lambda: lesson.ours_both(library)],
                      "FLA forward": [lesson.theirs_forward],
                      "FLA both": [lesson.theirs_both]}, replays)
        times = {"forward": (ms["ours forward"], ms["FLA forward"]),
                 "backward": (ms["ours both"] - ms["ours forward"],
                              ms["FLA both"] - ms["FLA forward"]),
                 "both": (ms["ours both"], ms["FLA both"])}
        print(f"{sequences:>3}x{length:<5} "
              + "   ".join(f"{name} {a:.3f} / {b:.3f} ({b / a:.2f})" for name, (a, b) in times.items()))
        lesson.compare(library)


class Rows:
    """The gated norm's tensors, for both."""

    def __init__(self, rows, dim):
        self.x, self.gate = (uniform(rows, dim, low=-2.0, high=2.0) for _ in range(2))
        self.dy = uniform(rows, dim)
        self.gamma = uniform(dim, low=0.5, high=1.5, dtype=torch.float32)
        self.view = lambda t: t.view(1, -1, HV, dim)
        self.rstd = torch.rsqrt(self.x.float().square().mean(-1) + EPS)

    def ours_forward(self, library):
        return GatedRmsNorm(library, self.view(self.x), self.view(self.gate), self.gamma, EPS)

    def theirs_forward(self):
        return peers_fla.norm_forward(self.x, self.gate, self.gamma, EPS)

    def theirs_backward(self):
        return peers_fla.norm_backward(self.dy, self.x, self.gate, self.gamma, EPS, self.rstd)

    def compare(self, library):
        norm = self.ours_forward(library)
        errors = {"y": apart(self.theirs_forward()[0], norm.y.view(self.x.shape))}
        for name, theirs, ours in zip(("dx", "dgate", "dgamma"), self.theirs_backward(),
                                      norm.backward(self.view(self.dy))):
            errors[name] = apart(theirs, ours.view(theirs.shape))
        print("        apart: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()),
              flush=True)


def norm_table(library, cases, replays):
    print("\ngated norm; us, ours / FLA (ratio)")
    for rows, dim in cases:
        peers_fla.tune_anew()
        sets = [Rows(rows, dim) for _ in range(sets_for(rows * (dim * 10 + 4)))]
        norms = [s.ours_forward(library) for s in sets]
        ms = medians(
            {"ours forward": [lambda s=s: s.ours_forward(library) for s in sets],
             "FLA forward": [s.theirs_forward for s in sets],
             "ours backward": [lambda s=s, n=n: n.backward(s.view(s.dy)) for s, n in zip(sets, norms)],
             "FLA backward": [s.theirs_backward for s in sets]}, replays)
        times = {what: (1e3 * ms[f"ours {what}"], 1e3 * ms[f"FLA {what}"])
                 for what in ("forward", "backward")}
        print(f"{rows}x{dim} "
              + "   ".join(f"{what} {a:.2f} / {b:.2f} ({b / a:.2f})" for what, (a, b) in times.items()))
        sets[0].compare(library)


def compile_part(part, options, rank, ranks):
    """Launches every kernel of a table once, at small sizes where the size does not matter."""
    if part == "decode":
        peers_decode.compile_kernels(options.decode[rank::ranks], options.sglang)
        return
    if part == "prefill":
        lengths = {sequences * length for sequences, length in options.prefill}
        with torch.no_grad():
            Prompts(1, 1024).prefill(packed(1, 1024, torch.int64))
        backward = False
    else:
        lengths = {sequences * length for sequences, length in options.training}
        peers_fla.allow_backward()
        Lesson(1, 1024).theirs_both()
        for rows, dim in options.norm:
            norm_rows = Rows(rows, dim)
            norm_rows.theirs_forward()
            norm_rows.theirs_backward()
        backward = True
    for blocks in {-(-tokens * H // NORM_ROWS) for tokens in lengths}:
        peers_fla.compile_norms_of(blocks * NORM_ROWS, backward)
    torch.cuda.synchronize()


def pairs(text):
    return [tuple(int(n) for n in item.split("x")) for item in text.split(",")]


def parse():
    parser = argparse.ArgumentParser(usage=__doc__[__doc__.index("usage:") + 7:])
    parser.add_argument("library")
    parser.add_argument("--tables", default="prefill,training,norm")
    parser.add_argument("--prefill", type=pairs, default=pairs(
        "1x1024,1x8192,1x32768,1x131072,16x2048,8x8192,64x256,128x512"))
    parser.add_argument("--training", type=pairs, default=pairs("8x4096,1x32768"))
    parser.add_argument("--norm", type=pairs, default=pairs("65536x128,65536x64,65536x256"))
    parser.add_argument("--decode", type=pairs, default=[
        (heads, batch) for heads in (16, 32, 48, 64) for batch in (1, 4, 16, 64, 256, 512)])
    parser.add_argument("--sglang")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # PART:RANK:RANKS
    if "--processes" in sys.argv:
        parser.error("write --processes=N")
    return parser.parse_args()


def main():
    options = parse()
    torch.manual_seed(1)
    if options.compile:
        part, rank, ranks = options.compile.split(":")
        peers_fla.compile_share(int(rank), int(ranks))
        compile_part(part, options, int(rank), int(ranks))
        return
    begin = time.monotonic()
    library = Library(options.library, "cuda")
    tables = options.tables.split(",")
    if options.processes:
        shares = {"prefill": 0.4, "training": 0.6, "decode": 0.3}
        wanted = {"training" if table == "norm" else table for table in tables}
        whole = sum(shares[part] for part in wanted)
        peers_fla.compile_in_parallel([a for a in sys.argv if not a.startswith("--processes=")],
                                      {part: shares[part] / whole for part in sorted(wanted)},
                                      options.processes)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, compiled in "
          f"{time.monotonic() - begin:.0f} s", flush=True)
    for name, table, cases in (("norm", norm_table, options.norm),
                               ("training", training_table, options.training),
                               ("prefill", prefill_table, options.prefill),
                               ("decode", peers_decode.table, options.decode)):
        if name in tables:
            more = (options.sglang,) if name == "decode" else ()
            table(library, cases, options.replays, *more)
            print(f"({time.monotonic() - begin:.0f} s)", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
