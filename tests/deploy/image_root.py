"""The CPU image without Docker: its last stage played on a root that debootstrap makes."""

import gzip
import io
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import unittest

from dockerfile import Dockerfile
from tools import SOURCE, WORK, program

# What the slim images leave out of every package.
SLIM = """path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/info/*
path-exclude /usr/share/lintian/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/man/*
"""


def need_root():
    if os.geteuid() != 0:
        raise unittest.SkipTest("debootstrap and chroot need root")
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True,
                      check=False).returncode != 0:
        raise unittest.SkipTest("this container may not make namespaces (unshare --mount --pid)")


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        raise AssertionError(f"{shlex.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def base_root(folder):
    """Debian 12 as debootstrap makes it, kept as an archive between runs."""
    archive = os.path.join(WORK, "bookworm-minbase.tar")
    if not os.path.exists(archive):
        debootstrap = program("debootstrap", "debootstrap")
        with tempfile.TemporaryDirectory(dir=WORK) as work:
            root = os.path.join(work, "root")
            done = subprocess.run([debootstrap, "--variant=minbase", "bookworm", root],
                                  capture_output=True, text=True, timeout=420, check=False)
            if done.returncode != 0:
                tail = "; ".join((done.stdout + done.stderr).strip().splitlines()[-2:])
                raise unittest.SkipTest(f"debootstrap cannot make a root (network?): {tail}")
            run("tar", "-C", root, "--exclude=./var/cache/apt/archives/*.deb", "-cf",
                archive + ".part", ".")
            os.rename(archive + ".part", archive)
    os.mkdir(folder)
    run("tar", "-C", folder, "-xpf", archive)
    with open(os.path.join(folder, "etc/dpkg/dpkg.cfg.d/slim"), "w", encoding="ascii") as file:
        file.write(SLIM)


def play(dockerfile, root, build):
    """Does to `root` what the instructions of the last stage say."""
    for word, rest in dockerfile.runtime:
        if word == "RUN":
            resolv = os.path.join(root, "etc/resolv.conf")
            shutil.copy("/etc/resolv.conf", resolv)
            run("chroot", root, "/bin/sh", "-c", rest, timeout=300,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"})
            os.remove(resolv)
        elif word == "COPY" and "--from=build" in rest:
            assert rest == "--from=build /installed /", rest
            run("cmake", "--install", build, "--component", "runtime", "--strip", "--prefix",
                os.path.join(root, "usr"))
        elif word == "COPY":
            source, target = rest.split()
            target = os.path.join(root, target.lstrip("/"))
            os.makedirs(target, exist_ok=True)
            shutil.copy(os.path.join(SOURCE, source), target)


def snapshot(root):
    """Every file, with what tells whether it has changed."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            found[os.path.relpath(path, root)] = (status.st_size, status.st_mtime_ns)
    return found


def layer_bytes(root, before):
    """What the layers add to the base: bytes of content, and of a gzipped archive, as it is pulled."""
    content = 0
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=6) as stream:
        with tarfile.open(fileobj=stream, mode="w|") as archive:
            for path, state in sorted(snapshot(root).items()):
                if before.get(path) != state:
                    archive.add(os.path.join(root, path), path)
                    content += os.lstat(os.path.join(root, path)).st_size
    return content, packed.tell()


def cpu_image(folder, build):
    """(Dockerfile, root, bytes of content, bytes packed)"""
    dockerfile = Dockerfile("cpu.Dockerfile")
    root = os.path.join(folder, "root")
    base_root(root)
    before = snapshot(root)
    play(dockerfile, root, build)
    return dockerfile, root, *layer_bytes(root, before)
