"""The Dockerfiles and the compose stack, as far as files tell."""

import os
import re
import unittest

from dockerfile import Dockerfile
from tools import DEPLOY, SOURCE, load_file

FILES = ("cpu.Dockerfile", "cuda.Dockerfile")


def version():
    with open(os.path.join(SOURCE, "CMakeLists.txt"), encoding="utf-8") as file:
        return re.search(r"project\(gdn VERSION (\S+)", file.read()).group(1)


class DockerfileTest(unittest.TestCase):
    def test_runtime_packages_come_from_the_list_alone(self):
        for name in FILES:
            runs = Dockerfile(name).all("RUN")
            self.assertEqual(len(runs), 1)
            self.assertEqual([step.strip() for step in runs[0].split("&&")], [
                "apt-get update",
                "xargs -a /usr/share/gdn/runtime-packages.txt "
                "apt-get install -y --no-install-recommends",
                "rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*"])
            self.assertIn("deploy/docker/runtime-packages.txt /usr/share/gdn/",
                          Dockerfile(name).all("COPY"))

    def test_it_runs_without_a_shell_as_nobody_in_particular(self):
        for name in FILES:
            file = Dockerfile(name)
            self.assertEqual(file.exec_form("ENTRYPOINT")[0], "/usr/bin/gdn_server")
            self.assertTrue(all(word.startswith("--") for word in file.exec_form("CMD")))
            self.assertEqual(file.exec_form("HEALTHCHECK"), ["/usr/bin/gdnctl", "health"])
            self.assertEqual(file.all("STOPSIGNAL"), ["SIGTERM"])
            uid, gid = map(int, file.all("USER")[0].split(":"))
            self.assertGreater(min(uid, gid), 0)

    def test_bases_and_versions_are_pinned(self):
        for name in FILES:
            file = Dockerfile(name)
            for key in {"BASE", "CUDA"} & set(file.args):
                self.assertRegex(file.args[key], r":\d+\.\d+.*-|@sha256:")
            self.assertEqual(file.args["VERSION"], version())
            for stage in range(len(file.stages)):
                self.assertRegex(file.all("FROM", stage)[0], r"^\$\{(BASE|CUDA)\}")

    def test_the_cuda_image_has_the_library_that_is_loaded_by_name(self):
        with open(os.path.join(SOURCE, "kernels/cuda/cublaslt_loader.cc"), encoding="utf-8") as file:
            loaded = set(re.findall(r'"(lib\w+\.so\.\d+)"', file.read()))
        self.assertEqual(len(loaded), 1)
        file = Dockerfile("cuda.Dockerfile")
        copied = re.findall(r"cp -L (\S+) (/installed/\S+)", " ".join(file.all("RUN", 1)))
        self.assertEqual({os.path.basename(source) for source, _ in copied}, loaded)
        for _, target in copied:  # A folder that the loader looks into.
            self.assertEqual(target.rstrip("/"), "/installed/usr/lib/x86_64-linux-gnu")
        self.assertIn("--from=build /installed /", file.all("COPY"))

    def test_labels(self):
        for name in FILES:
            (labels,) = Dockerfile(name).all("LABEL")
            for key in ("title", "description", "licenses", "version", "revision"):
                self.assertIn(f"org.opencontainers.image.{key}=", labels)


class ComposeTest(unittest.TestCase):
    def setUp(self):
        self.folder = os.path.join(DEPLOY, "compose")
        self.services = load_file(self.folder, "compose.yml")[0]["services"]

    def test_what_is_mounted_and_built_exists(self):
        build = self.services["gdn"]["build"]
        self.assertTrue(os.path.exists(os.path.join(self.folder, build["context"],
                                                    build["dockerfile"])))
        mounts = [volume.split(":") for service in self.services.values()
                  for volume in service.get("volumes", ())]
        self.assertGreater(len(mounts), 3)
        for host, _, mode in mounts:
            self.assertTrue(os.path.exists(os.path.join(self.folder, host)), host)
            self.assertEqual(mode, "ro")

    def test_images_are_pinned_and_ports_stay_on_this_machine(self):
        for service in self.services.values():
            self.assertRegex(service["image"], r":v?\d+\.\d+")
            for port in service["ports"]:
                self.assertTrue(port.startswith("127.0.0.1:"), port)
        self.assertEqual(self.services["gdn"]["image"], f"gdn:{version()}-cpu")

    def test_the_server_is_stopped_patiently(self):
        self.assertGreater(int(self.services["gdn"]["stop_grace_period"].rstrip("s")), 30 + 1)

    def test_prometheus_scrapes_the_server_and_grafana_asks_prometheus(self):
        (scrape,) = load_file(DEPLOY, "prometheus/prometheus.yml")[0]["scrape_configs"]
        self.assertEqual(scrape["static_configs"], [{"targets": ["gdn:9090"]}])
        (source,) = load_file(DEPLOY, "grafana/provisioning/datasources/prometheus.yml")[0][
            "datasources"]
        self.assertEqual(source["url"], "http://prometheus:9090")
        (provider,) = load_file(DEPLOY, "grafana/provisioning/dashboards/gdn.yml")[0]["providers"]
        self.assertIn(f"../grafana/dashboards:{provider['options']['path']}:ro",
                      self.services["grafana"]["volumes"])

    def test_kubernetes_runs_the_same_version(self):
        for overlay, suffix in (("cpu", "cpu"), ("gpu", "cuda")):
            (image,) = load_file(DEPLOY, "kubernetes/overlays", overlay,
                                 "kustomization.yaml")[0]["images"]
            self.assertEqual(image["newTag"], f"{version()}-{suffix}")
