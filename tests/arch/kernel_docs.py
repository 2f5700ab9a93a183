#!/usr/bin/env python3
"""Compiles and runs every example of docs/kernels.md against the built shared library.

usage: kernel_docs.py DOCUMENT INCLUDE_FOLDER LIBRARY C_COMPILER CXX_COMPILER
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

BLOCK = re.compile(r"^```(c|cpp|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main(document, include, library, c_compiler, cxx_compiler):
    blocks = BLOCK.findall(pathlib.Path(document).read_text())
    if {language for language, _ in blocks} != {"c", "cpp", "python"}:
        return f"{document}: expected examples in c, cpp and python"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    for index, (language, text) in enumerate(blocks):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, f"example.{dict(c='c', cpp='cc', python='py')[language]}")
            source.write_text(text)
            command = [sys.executable, source]
            if language != "python":
                compiler = [c_compiler, "-std=c11"] if language == "c" else [cxx_compiler,
                                                                             "-std=c++20"]
                command = [pathlib.Path(folder, "example")]
                subprocess.run([*compiler, *warnings, "-I", include, source, "-o", command[0],
                                library, f"-Wl,-rpath,{pathlib.Path(library).parent}"], check=True)
            result = subprocess.run(command, env={**os.environ, "GDN_KERNELS": library})
            if result.returncode != 0:
                return f"{document}: example {index + 1} ({language}) failed: {result.returncode}"
    return None


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
