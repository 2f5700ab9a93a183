"""Programs and files the deployment tests use: from Debian, or pinned from PyPI. A test without them skips
and says what is missing."""

import hashlib
import os
import shutil
import subprocess
import unittest

import yaml

SOURCE = os.environ["GDN_SOURCE_DIR"]
WORK = os.environ["GDN_DEPLOY_WORK"]  # Kept between runs.
DEPLOY = os.path.join(SOURCE, "deploy")
RULES = [os.path.join(DEPLOY, "prometheus/rules", name)
         for name in ("gdn-recording.yml", "gdn-alerts.yml")]
DASHBOARD = os.path.join(DEPLOY, "grafana/dashboards/gdn.json")


def program(name, package):
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise unittest.SkipTest(f"{name} is missing: apt-get install {package}")
    return path


def pypi_tools():
    """A folder with what requirements.txt names, fetched once."""
    here = os.path.dirname(os.path.abspath(__file__))
    requirements = os.path.join(here, "requirements.txt")
    with open(requirements, "rb") as file:
        folder = os.path.join(WORK, "pypi-" + hashlib.sha256(file.read()).hexdigest()[:12])
    if os.path.isdir(folder):
        return folder
    part = f"{folder}.{os.getpid()}"
    done = subprocess.run(
        ["/usr/bin/python3", "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:",
         "--require-hashes", "--retries=1", "--target", part, "-r", requirements],
        capture_output=True, text=True, timeout=150, check=False)
    if done.returncode != 0:
        shutil.rmtree(part, ignore_errors=True)
        if "hash" in done.stderr.lower() and "match" in done.stderr.lower():
            raise AssertionError(f"a pinned package has changed: {done.stderr}")
        raise unittest.SkipTest("no tools from PyPI (python3-pip and the network are needed): "
                                + (done.stderr.strip().splitlines() or ["?"])[-1])
    os.rename(part, folder)
    return folder


def load_all(text):
    return [document for document in yaml.safe_load_all(text) if document is not None]


def load_file(*parts):
    with open(os.path.join(*parts), encoding="utf-8") as file:
        return load_all(file)


def rule_groups():
    """The groups of all rule files, in order."""
    return [group for path in RULES for group in load_file(path)[0]["groups"]]
