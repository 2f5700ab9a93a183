#!/usr/bin/env python3
"""The baseline of the engine's benchmarks: transformers, with flash-linear-attention's kernels where it
finds them, on a model of random weights in the shape of a config.json. Decoding is a bare loop of
forward calls, without what generate() does around them.

Decode: greedy tokens a second of equal prompts in one batch, the median of --rounds runs, without the
prompt's time. Prefill: milliseconds from the call to the first token. Says which kernels ran; `torch`
there is transformers' own slow path.

usage: transformers_bench.py CONFIG [--streams=1,16,64] [--prompt=512] [--tokens=64] [--prefill=1x8192]
       [--rounds=5] [--device=cuda]
"""

import argparse
import json
import statistics
import time

import torch
import transformers


def numbers(text):
    return [int(n) for n in text.split(",")]


def cases(text):
    return [tuple(int(n) for n in item.split("x")) for item in text.split(",")]


def parse():
    parser = argparse.ArgumentParser(usage=__doc__[__doc__.index("usage:") + 7:])
    parser.add_argument("config")
    parser.add_argument("--streams", type=numbers, default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prefill", type=cases, default=[(1, 8192)])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def build(path, device):
    with open(path) as file:
        values = json.load(file)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def kernels_of(model):
    """Where the rule and the convolution that the model's layers call come from."""
    module = __import__(type(model).__module__, fromlist=["_"])
    found = {}
    for name in dir(module):
        function = getattr(module, name)
        if "gated_delta_rule" in name or name.startswith("causal_conv1d"):
            cells = getattr(function, "__closure__", None) or ()
            inner = [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
            packages = {f.__module__.split(".")[0] for f in inner if hasattr(f, "__module__")}
            found[name] = "fla" if "fla" in packages else (
                "causal_conv1d" if "causal_conv1d" in packages else "torch")
    return found


class Clock:
    def __init__(self, device):
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(self, call):
        self.wait()
        begin = time.perf_counter()
        result = call()
        self.wait()
        return time.perf_counter() - begin, result


def forward(model, ids, begin, cache=None):
    """The next token of each row, and the cache; `begin` tokens came before.

    Positions and masks are given: transformers derives both from an attention layer's cache, and
    refuses a model without such a layer. Rows of equal length need no mask.
    """
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1,
                position_ids=torch.arange(begin, begin + ids.shape[1], device=ids.device)[None],
                attention_mask={"full_attention": None, "linear_attention": None})
    return out.logits[:, -1:].argmax(-1), out.past_key_values


def decode(model, token, begin, cache, tokens):
    for i in range(tokens):
        token, cache = forward(model, token, begin + i, cache)


def tokens_per_second(model, clock, prompt, tokens):
    token, cache = forward(model, prompt, 0)
    seconds, _ = clock.seconds(lambda: decode(model, token, prompt.shape[1], cache, tokens))
    return len(prompt) * tokens / seconds


def main():
    options = parse()
    torch.manual_seed(1)
    model = build(options.config, options.device)
    clock = Clock(options.device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, "
          f"{parameters / 1e9:.2f} B parameters")
    print("kernels: " + ", ".join(f"{name}: {where}" for name, where in kernels_of(model).items()))
    prompt = lambda rows, length: torch.randint(0, model.config.vocab_size, (rows, length),
                                                device=options.device)
    with torch.inference_mode():
        for streams in options.streams:
            ids = prompt(streams, options.prompt)
            tokens_per_second(model, clock, ids, 8)  # Kernels compile.
            rates = [tokens_per_second(model, clock, ids, options.tokens)
                     for _ in range(options.rounds)]
            print(f"{streams:4} streams  {statistics.median(rates):8.0f} tokens/s", flush=True)
        for rows, length in options.prefill:
            ids = prompt(rows, length)
            forward(model, ids, 0)
            times = [clock.seconds(lambda: forward(model, ids, 0))[0]
                     for _ in range(options.rounds)]
            print(f"prefill {rows}x{length}  {1e3 * statistics.median(times):.2f} ms", flush=True)


if __name__ == "__main__":
    main()
