"""Every test that the checklist names exists.

usage: checklist_names.py CHECKLIST SOURCE_FOLDER...
"""
import pathlib
import re
import sys

TEST = re.compile(r"\b(?:GDN_BACKEND_TEST|TYPED_TEST|TEST|TEST_F|TEST_P)\(\s*(\w+)\s*,\s*(\w+)\s*\)")
NAME = re.compile(r"`([A-Z]\w*)\.([A-Z]\w*)`")


def main(checklist, *folders):
    tests = set()
    for folder in folders:
        for path in pathlib.Path(folder).rglob("*_test.cc"):
            tests.update(TEST.findall(path.read_text()))
    named = NAME.findall(pathlib.Path(checklist).read_text())
    assert named and tests, "nothing to compare"
    missing = sorted({f"{suite}.{name}" for suite, name in named
                      if (suite, name) not in tests and (suite, name) != ("Suite", "Name")
                      and (suite, name) != ("SuiteOnCuda", "Name")})
    if missing:
        sys.exit(f"{checklist} names tests that do not exist: {', '.join(missing)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
