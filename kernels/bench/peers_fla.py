"""flash-linear-attention as the peers' benchmark runs it: tuned anew for every case, its kernels
compiled by many processes beforehand.

A Triton kernel is tuned for the first shape that meets its key, which leaves out the lengths; here
every case is tuned on its own, so that none runs with what was best for another.
"""

import gc
import os
import subprocess
import sys

os.environ.setdefault("FLA_CACHE_RESULTS", "0")  # Results on disk would be those of another case.

import torch
import triton
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError

import fla.ops.common.chunk_o as chunk_o
from fla.modules.fused_norm_gate import layer_norm_gated_bwd, layer_norm_gated_fwd
from fla.modules.l2norm import l2norm_bwd, l2norm_fwd
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

NOT_FOR_THIS_GPU = (OutOfResources, CompileTimeAssertionFailure, PTXASError)


def allow_backward():
    """FLA refuses its backward on Hopper with Triton 3.4 to 3.7.0, which miscompile a kernel of it
    (its issue 640). Calls it all the same; the caller compares what comes out.

    Returns whether there was something to allow.
    """
    refused = (chunk_o.IS_NVIDIA_HOPPER and chunk_o.TRITON_ABOVE_3_4_0
               and not chunk_o.TRITON_ABOVE_3_7_1)
    chunk_o.TRITON_ABOVE_3_7_1 = True
    return refused


def tune_anew():
    """Forgets what was found best, and makes the next search shorter than Triton's own."""
    bench = lambda call, quantiles: triton.testing.do_bench(call, warmup=4, rep=20,
                                                            quantiles=quantiles)
    for tuner in (o for o in gc.get_objects() if issubclass(type(o), Autotuner)):
        tuner.cache.clear()
        tuner._do_bench = bench
        tuner.__dict__.pop("do_bench", None)


def rule(q, k, v, g, beta, cu_seqlens, initial_state=None, output_final_state=False):
    """The chunked rule on packed sequences, [1, T, H, K] and so on; q and k normalised in it."""
    return chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state,
                                  output_final_state=output_final_state,
                                  use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)


def norm_forward(x, gate, gamma, eps):
    """y and rstd of [rows, dim]."""
    y, _, rstd, _ = layer_norm_gated_fwd(x, gate, gamma, None, "swish", eps, is_rms_norm=True)
    return y, rstd


def norm_backward(dy, x, gate, gamma, eps, rstd):
    """dx, dgate and dgamma of [rows, dim]."""
    return layer_norm_gated_bwd(dy, x, gate, gamma, None, "swish", eps, rstd=rstd, is_rms_norm=True,
                                x_dtype=x.dtype)[:3]


def compile_share(rank, ranks):
    """From now on a kernel is not tuned but compiled: its configurations rank, rank + ranks, ..."""

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        configs = self.prune_configs(kwargs)
        for config in configs[rank % len(configs)::ranks]:
            try:
                self.fn.run(*args, **kwargs, **config.all_kwargs())
            except NOT_FOR_THIS_GPU:
                pass  # Tuning leaves it out too.
        self.nargs = None

    Autotuner.run = run


def compile_in_parallel(script, parts, processes):
    """Runs `script --compile PART:RANK:RANKS`; what they compile stays in TRITON_CACHE_DIR.

    parts: what to compile, with its share of the processes, out of 1.
    """
    running = []
    for part, share in parts.items():
        ranks = max(1, round(share * processes))
        for rank in range(ranks):
            running.append(subprocess.Popen(
                [sys.executable, "-W", "ignore", *script, "--compile", f"{part}:{rank}:{ranks}"]))
    failed = sum(process.wait() != 0 for process in running)
    if failed:
        sys.exit(f"{failed} of {len(running)} compiling processes failed; their messages are above")


def compile_norms_of(rows, backward):
    """The norm of q and k, which has a kernel for every number of 65,536 rows begun."""
    x = torch.zeros(rows, 128, dtype=torch.bfloat16, device="cuda")
    y, rstd = l2norm_fwd(x)
    if backward:
        l2norm_bwd(y, rstd, x)
