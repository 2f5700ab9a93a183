#!/usr/bin/env python3
"""Holds the exports of libgdn_kernels.so to the functions that its public headers declare.

usage: exported_symbols.py NM LIBRARY HEADER_FOLDER
"""

import pathlib
import re
import subprocess
import sys

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
PREPROCESSOR = re.compile(r"^\s*#.*(?:\\\n.*)*", re.MULTILINE)
FUNCTION = re.compile(r"\b(gdn_\w+)\s*\(")


def declared(folder):
    names = set()
    for header in sorted(pathlib.Path(folder).glob("*.h")):
        text = PREPROCESSOR.sub("", COMMENT.sub("", header.read_text()))
        names.update(FUNCTION.findall(text))
    return names


def exported(nm, library):
    lines = subprocess.run([nm, "--dynamic", "--defined-only", "--format=posix", library],
                           check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[0] for line in lines}


def check(nm, library, folder):
    in_headers, in_library = declared(folder), exported(nm, library)
    errors = [f"{name}: exported, but no public header declares it; see kernels/gdn_kernels.map"
              for name in sorted(in_library - in_headers)]
    errors += [f"{name}: declared in a public header, but not exported"
               for name in sorted(in_headers - in_library)]
    if len(in_headers) < 10:
        errors.append(f"only {len(in_headers)} functions found in {folder}: is this the folder?")
    return errors


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    problems = check(*sys.argv[1:])
    print("\n".join(problems) or "the exports are those of the headers")
    sys.exit(1 if problems else 0)
