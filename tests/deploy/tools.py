"""Programs and files the deployment tests use: from Debian, or pinned from PyPI. A test without them skips
and says what is missing."""

import hashlib
import os
import shutil
import subprocess
import tempfile
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


def unpacked_program(name, package):
    """The same, unpacked from its package where it is not installed: installed, it would run as a service."""
    path = shutil.which(name)
    if path is not None:
        return path
    folder = os.path.join(WORK, f"debian-{package}")
    path = os.path.join(folder, "usr/bin", name)
    if not os.path.exists(path):
        with tempfile.TemporaryDirectory(dir=WORK) as work:
            program("apt-get", "apt")
            os.chmod(work, 0o777)  # apt downloads as a user of its own.
            done = subprocess.run(["apt-get", "download", "--quiet", package], cwd=work, text=True,
                                  capture_output=True, timeout=120, check=False)
            archives = [entry.path for entry in os.scandir(work) if entry.name.endswith(".deb")]
            if done.returncode != 0 or not archives:
                raise unittest.SkipTest(
                    f"{name} is missing and apt-get download {package} failed (network?): "
                    f"{done.stderr.strip()[-200:]}")
            subprocess.run(["dpkg-deb", "-x", archives[0], os.path.join(work, "root")], check=True)
            try:
                os.rename(os.path.join(work, "root"), folder)
            except OSError:  # Another test was faster.
                pass
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
    try:
        os.rename(part, folder)
    except OSError:  # Another test was faster.
        shutil.rmtree(part, ignore_errors=True)
    return folder


def load_all(text):
    return [document for document in yaml.safe_load_all(text) if document is not None]


def load_file(*parts):
    with open(os.path.join(*parts), encoding="utf-8") as file:
        return load_all(file)


def rule_groups():
    """The groups of all rule files, in order."""
    return [group for path in RULES for group in load_file(path)[0]["groups"]]
