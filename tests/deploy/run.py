#!/usr/bin/env python3
"""Runs one module of tests. Exit status 77, a skip to ctest, if not a single one could run."""

import importlib
import os
import sys
import unittest

SKIPPED = 77


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:0] = [here, os.path.join(os.path.dirname(here), "e2e")]
    suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(sys.argv[1]))
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    for test, reason in result.skipped:
        print(f"SKIPPED {test}: {reason}")
    if not result.wasSuccessful():
        return 1
    return SKIPPED if result.testsRun == 0 or len(result.skipped) >= result.testsRun else 0


if __name__ == "__main__":
    sys.exit(main())
