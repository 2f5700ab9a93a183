#!/usr/bin/env python3
"""Compiles and runs every example of the documents of the kernels against the built shared library.

usage: kernel_docs.py INCLUDE_FOLDER LIBRARY C_COMPILER CXX_COMPILER DOCUMENT...

Examples print nothing, but for a line "CUDA not tried" where one finds no GPU. With
GDN_REQUIRE_GPU=1 that is a failure.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

BLOCK = re.compile(r"^```(c|cpp|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_TRIED = re.compile(r"CUDA not tried.*\n")


def run(language, text, include, library, c_compiler, cxx_compiler):
    """What is wrong with an example, or None."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, f"example.{dict(c='c', cpp='cc', python='py')[language]}")
        source.write_text(text)
        command = [sys.executable, source]
        if language != "python":
            compiler = [c_compiler, "-std=c11"] if language == "c" else [cxx_compiler, "-std=c++20"]
            command = [pathlib.Path(folder, "example")]
            built = subprocess.run([*compiler, "-Wall", "-Wextra", "-Werror", "-I", include, source,
                                    "-o", command[0], library,
                                    f"-Wl,-rpath,{pathlib.Path(library).parent}"])
            if built.returncode != 0:
                return "does not compile"
        result = subprocess.run(command, env={**os.environ, "GDN_KERNELS": library},
                                stdout=subprocess.PIPE, text=True)
    print(result.stdout, end="")
    if result.returncode != 0:
        return f"failed: {result.returncode}"
    if result.stdout and not NOT_TRIED.fullmatch(result.stdout):
        return "printed something"
    if result.stdout and os.environ.get("GDN_REQUIRE_GPU") == "1":
        return f"{result.stdout.strip()}, and GDN_REQUIRE_GPU=1"
    return None


def main(include, library, c_compiler, cxx_compiler, *documents):
    languages = set()
    for document in documents:
        blocks = BLOCK.findall(pathlib.Path(document).read_text())
        if not blocks:
            return f"{document}: no examples"
        for index, (language, text) in enumerate(blocks):
            languages.add(language)
            wrong = run(language, text, include, library, c_compiler, cxx_compiler)
            if wrong:
                return f"{document}: example {index + 1} ({language}): {wrong}"
    if languages != {"c", "cpp", "python"}:
        return f"expected examples in c, cpp and python, got {sorted(languages)}"
    return None


if __name__ == "__main__":
    if len(sys.argv) < 6:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
