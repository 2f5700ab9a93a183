#!/usr/bin/env python3
"""Holds the include arrows: rpc -> engine -> pipeline -> model -> kernels, never back.

Each folder lists what it may include, of the project and of third parties. Anything else is an error.
usage: include_arrows.py REPO_ROOT
"""

import pathlib
import re
import sys

# folder: (project folders it may include, third-party prefixes it may include)
GRPC = ("grpc", "google/protobuf", "gdn/v1/", "google/rpc/", "health.grpc")
RULES = {
    "kernels": (("kernels/", "gdn/kernels/"),
                ("hwy/", "oneapi/dnnl/", "omp.h", "cuda", "cublas", "dlfcn.h")),
    "server/model": (("server/model/",), ("absl/", "nlohmann/", "xxhash.h")),
    "server/pipeline": (("server/pipeline/", "server/model/", "gdn/kernels/"),
                        ("absl/", "cuda_runtime_api.h")),
    "server/engine": (("server/engine/", "server/pipeline/pipeline.h"),
                      ("absl/status/", "absl/strings/")),
    "server/metrics": (("server/metrics/", "server/engine/", "server/pipeline/pipeline.h",
                        "server/rpc/observer.h"),
                       ("absl/status/", "absl/strings/", "prometheus/")),
    "server/rpc": (("server/rpc/", "server/engine/", "server/pipeline/pipeline.h"),
                   ("absl/", "spdlog/") + GRPC),
    "client/cpp": (("client/cpp/", "gdn/client/"), ("absl/", "CLI/", "nlohmann/") + GRPC),
}
# Tests and benchmarks may also use these.
TEST_EXTRA = ("gtest/", "gmock/", "benchmark/", "tests/", "nlohmann/", "dlfcn.h")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[>"]')
SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".c", ".hpp", ".cpp"}


def is_system(name):
    return "/" not in name and (not name.endswith(".h") or name in SYSTEM_C) or name.startswith(
        ("sys/", "netinet/", "arpa/"))


SYSTEM_C = {
    "errno.h", "fcntl.h", "immintrin.h", "inttypes.h", "limits.h", "math.h", "poll.h", "pthread.h",
    "sched.h", "signal.h", "stdbool.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h",
    "time.h", "unistd.h", "netdb.h", "spawn.h", "termios.h",
}


def check(root):
    errors, seen = [], 0
    for folder, (own, third_party) in RULES.items():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            is_test = re.search(r"(^|_)(test|bench|fuzz)(_|$)", path.stem) or any(
                part in ("bench", "testing") for part in path.relative_to(root / folder).parts)
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                if not match:
                    continue
                seen += 1
                name = match.group(2)
                allowed = own + third_party + (TEST_EXTRA if is_test else ())
                if name.startswith(allowed) or (match.group(1) == "<" and is_system(name)):
                    continue
                errors.append(f"{path.relative_to(root)}:{number}: {folder} may not include {name}")
    if seen < 50:
        errors.append(f"only {seen} includes found under {root}: is this the repository root?")
    return errors


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    problems = check(pathlib.Path(sys.argv[1]).resolve())
    print("\n".join(problems) or "include arrows hold")
    sys.exit(1 if problems else 0)
