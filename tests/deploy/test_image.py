"""The CPU image's content runs as it should: random user, read-only root, PID 1, no shell."""

import glob
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import unittest

from image_root import cpu_image, need_root
from support import PATIENCE_S, eventually
from tools import SOURCE, WORK, program

BUILD = os.environ["GDN_BUILD_DIR"]
# As pulled, and unpacked. The second is without the server, which in a build with CUDA holds machine code
# for GPUs that the CPU image does not have.
MAX_PACKED_BYTES = 60 * 1000 * 1000
MAX_BYTES_BESIDE_THE_SERVER = 90 * 1000 * 1000


class ImageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_root()
        program("bwrap", "bubblewrap")
        cls.folder = tempfile.TemporaryDirectory(dir=WORK)
        cls.addClassCleanup(cls.folder.cleanup)
        cls.dockerfile, cls.root, cls.content_bytes, cls.packed_bytes = cpu_image(
            cls.folder.name, BUILD)
        for shell in ("sh", "dash", "bash"):  # Nothing needs them.
            os.remove(os.path.join(cls.root, "bin", shell))

    def start(self, *arguments, mounts=()):
        """A container: process, and its first process's id out here. `mounts`: (folder, where)."""
        uid = str(random.randrange(100_000, 2_000_000_000))
        read, write = os.pipe()
        log = open(os.path.join(self.folder.name, "log"), "w+b")
        self.addCleanup(log.close)
        container = subprocess.Popen(
            ["bwrap", "--ro-bind", self.root, "/", "--proc", "/proc", "--dev", "/dev",
             *(word for mount in mounts for word in ("--ro-bind", *mount)),
             "--unshare-pid", "--unshare-net", "--unshare-ipc", "--as-pid-1",
             "--info-fd", str(write), "--clearenv", "--chdir", "/",
             "setpriv", f"--reuid={uid}", "--regid=0", "--clear-groups", "--bounding-set=-all",
             "--inh-caps=-all", "--no-new-privs", *self.dockerfile.exec_form("ENTRYPOINT"),
             *(arguments or self.dockerfile.exec_form("CMD"))],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[write])
        os.close(write)
        with os.fdopen(read, encoding="ascii") as info:
            pid = json.load(info)["child-pid"]

        def stop():
            if container.poll() is None:
                os.kill(pid, signal.SIGKILL)  # A change of user makes it outlive bwrap.
                container.wait()
        self.addCleanup(stop)
        self.uid, self.log = uid, log
        return container, pid

    def inside(self, pid, *command, check=False):
        return subprocess.run(["nsenter", f"--target={pid}", "--mount", "--pid", "--net", "--root",
                               "--wd", *command], capture_output=True, timeout=PATIENCE_S,
                              check=check, env={})

    def text_of_log(self):
        self.log.seek(0)
        return self.log.read().decode()

    def healthy(self, container, pid):
        self.assertIsNone(container.poll(), self.text_of_log())
        return self.inside(pid, *self.dockerfile.exec_form("HEALTHCHECK")).returncode == 0

    def test_every_package_of_the_list_is_needed(self):
        loaded = set()
        for name in ("gdn_server", "gdnctl"):
            done = subprocess.run(["chroot", self.root, "/lib64/ld-linux-x86-64.so.2", "--list",
                                   f"/usr/bin/{name}"], capture_output=True, text=True, check=True)
            loaded |= set(re.findall(r"=> \S*/(\S+)", done.stdout))
        self.assertGreater(len(loaded), 20)
        with open(os.path.join(self.root, "usr/share/gdn/runtime-packages.txt"),
                  encoding="ascii") as file:
            packages = file.read().split()
        for package in packages:
            lists = glob.glob(os.path.join(self.root, "var/lib/dpkg/info",
                                           f"{glob.escape(package)}[:.]*list"))
            self.assertEqual(len(lists), 1, package)
            with open(lists[0], encoding="utf-8") as file:
                files = {os.path.basename(line.strip()) for line in file}
            self.assertTrue(loaded & files, f"nothing of {package} is loaded")

    def test_size(self):
        server_bytes = os.path.getsize(os.path.join(self.root, "usr/bin/gdn_server"))
        print(f"\nlayers beyond the base: {self.content_bytes / 1e6:.1f} MB, of which the server "
              f"{server_bytes / 1e6:.1f} MB; {self.packed_bytes / 1e6:.1f} MB as pulled")
        self.assertLess(self.packed_bytes, MAX_PACKED_BYTES)
        self.assertLess(self.content_bytes - server_bytes, MAX_BYTES_BESIDE_THE_SERVER)

    def test_it_serves_and_drains(self):
        container, pid = self.start()
        eventually(lambda: self.healthy(container, pid), "the health check succeeds")
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            status = dict(line.split(":", 1) for line in file)
        self.assertEqual(status["Uid"].split(), [self.uid] * 4)
        self.assertEqual(status["NSpid"].split()[-1], "1")
        self.assertEqual(int(status["CapEff"], 16) | int(status["CapBnd"], 16), 0)
        self.assertEqual(status["NoNewPrivs"].strip(), "1")
        self.assertEqual(status["Name"].strip(), "gdn_server")
        touched = self.inside(pid, "/usr/bin/touch", "/usr/share/gdn/x")
        self.assertIn(b"Read-only file system", touched.stderr)

        said = self.inside(pid, "/usr/bin/gdnctl", "generate", "--max-new-tokens=20", "In the ",
                           check=True).stdout
        self.assertGreater(len(said), 5)
        # Outside the container's processes, which all die with the first of them.
        streaming = subprocess.Popen(
            ["nsenter", f"--target={pid}", "--mount", "--net", "--root", "--wd",
             "/usr/bin/gdnctl", "generate", "--output-ids", "--ignore-eos",
             "--max-new-tokens=3000", "In the "], stdout=subprocess.PIPE, env={})
        self.addCleanup(streaming.kill)
        self.assertTrue(streaming.stdout.read(1))
        os.kill(pid, signal.SIGTERM)  # As an engine stops a container: its first process.
        ids = streaming.stdout.read().split()
        streaming.stdout.close()
        self.assertEqual(streaming.wait(PATIENCE_S), 0)
        self.assertGreaterEqual(len(ids), 2_999)
        self.assertEqual(container.wait(PATIENCE_S), 0, self.text_of_log())
        for line in self.text_of_log().splitlines():
            json.loads(line)

    def test_a_mounted_model_instead_of_the_demo(self):
        with tempfile.TemporaryDirectory(dir=WORK) as models:
            os.chmod(models, 0o755)
            shutil.copytree(os.path.join(SOURCE, "deploy/models/demo-gdn-7m"),
                            os.path.join(models, "mine"))
            os.makedirs(os.path.join(self.root, "models"), exist_ok=True)  # As an engine does.
            container, pid = self.start("--model=/models/mine", mounts=[(models, "/models")])
            eventually(lambda: self.healthy(container, pid), "the health check succeeds")
            shown = self.inside(pid, "/usr/bin/gdnctl", "model", check=True).stdout.decode()
            self.assertIn("mine", shown)
            os.kill(pid, signal.SIGTERM)
            self.assertEqual(container.wait(PATIENCE_S), 0, self.text_of_log())

    def test_a_wrong_start_says_so(self):
        container, _ = self.start("--model=/models/none")
        self.assertEqual(container.wait(PATIENCE_S), 1)
        self.assertIn("/models/none", self.text_of_log())
