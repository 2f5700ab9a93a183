"""What the peers' benchmarks share: tensors, and calls of several kinds timed in turn."""

import statistics

import torch


def uniform(*shape, low=-1.0, high=1.0, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda").uniform_(low, high)


def sets_for(tensor_bytes, most=64):
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(most, 4 * l2 // tensor_bytes + 1))


def packed(sequences, length, dtype):
    return torch.arange(sequences + 1, device="cuda", dtype=dtype) * length


def apart(theirs, ours):
    theirs, ours = theirs.float(), ours.float()
    return ((theirs - ours).norm() / ours.norm()).item()


class Graph:
    """Calls captured once; each keeps its outputs, so that they do not share memory."""

    def __init__(self, calls):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()  # Triton compiles and tunes here.
        torch.cuda.synchronize()
        self.graph, self.calls = torch.cuda.CUDAGraph(), len(calls)
        with torch.cuda.graph(self.graph, stream=stream):
            self.kept = [call() for call in calls]

    def replay_ms(self):
        """Milliseconds a call of one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.calls


def medians(named_calls, replays):
    """Milliseconds a call, of each list of calls, replayed in turn; three rounds do not count."""
    graphs = {name: Graph(calls) for name, calls in named_calls.items()}
    times = {name: [] for name in graphs}
    for i in range(replays + 3):
        for name, graph in graphs.items():
            ms = graph.replay_ms()
            if i >= 3:
                times[name].append(ms)
    return {name: statistics.median(list_) for name, list_ in times.items()}
