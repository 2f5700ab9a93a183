"""What the e2e tests share: servers, stubs, requests, and waits with a deadline."""

import contextlib
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

try:
    import google.protobuf  # noqa: F401
    import grpc
except ImportError as error:
    sys.exit(f"{error}: the e2e tests need the Python client libraries of {sys.executable}; "
             "cure: apt-get install python3-grpcio python3-protobuf")

from e2e import health_pb2, health_pb2_grpc, reflection_pb2, reflection_pb2_grpc  # noqa: F401
from gdn.v1 import inference_pb2, inference_pb2_grpc, sessions_pb2, sessions_pb2_grpc, types_pb2
from google.rpc import error_details_pb2, status_pb2

SOURCE = os.environ["GDN_SOURCE_DIR"]
DEVICE = os.environ.get("GDN_E2E_DEVICE", "")  # "cuda": the same tests on a GPU.
MODEL = os.path.join(SOURCE, "deploy/models/demo-gdn-7m")
GOLDEN = os.path.join(SOURCE, "tests/data/demo-gdn-7m/golden.safetensors")
PROMPT = b"And God said unto Moses, "
CONTINUATION = (b"Go in peace, and say unto them, Thus saith the LORD God of Israel, "
                b"Thus saith the LORD God of Is")

# How close two ways to the same logits are: on a GPU the products are bfloat16, and a prompt is
# rounded at other places than a step.
CLOSE = 1e-2 if DEVICE else 1e-4

# Arithmetic in which every sequence has one right answer, bit for bit.
EXACT = ("--precision=float32", "--batch-invariant")

# No healthy call comes near it. A wait that ends by it is a failure.
PATIENCE_S = 60


def eventually(predicate, what, deadline_s=PATIENCE_S):
    """Waits until predicate() is true; the pause between two looks is not what makes it so."""
    end = time.monotonic() + deadline_s
    while not predicate():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        time.sleep(0.01)


class Server:
    """A gdn_server process on free ports of the loopback interface. On the CPU, unless
    GDN_E2E_DEVICE or a flag says otherwise."""

    def __init__(self, *flags, model=MODEL, metrics=False, max_files=None,
                 listen="127.0.0.1:0", hide_gpus=False):
        self._folder = tempfile.TemporaryDirectory()
        self.log_path = os.path.join(self._folder.name, "log")
        port_file = os.path.join(self._folder.name, "port")
        if DEVICE:  # The products are bfloat16 there.
            flags = [flag for flag in flags if not flag.startswith("--precision")]
        if not any(flag.startswith("--device=") for flag in flags):
            flags = [*flags, f"--device={DEVICE or 'cpu'}"]
        command = [os.environ["GDN_SERVER"], "--model", model, "--listen", listen,
                   "--port-file", port_file, "--metrics-listen",
                   "127.0.0.1:0" if metrics else "off", *flags]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **({"CUDA_VISIBLE_DEVICES": "-1"} if hide_gpus else {})},
                preexec_fn=max_files and (lambda: resource.setrlimit(
                    resource.RLIMIT_NOFILE, (max_files, max_files))))
        try:
            eventually(lambda: os.path.exists(port_file) or self.process.poll() is not None,
                       "the server opens its port")
            if self.process.poll() is not None:
                raise AssertionError(f"the server did not start:\n{self.log()}")
            with open(port_file, encoding="ascii") as file:
                self.address = f"127.0.0.1:{int(file.read())}"
            self.client = Client(self.address)
            eventually(self._ready, "the server is ready")
        except BaseException:
            self.stop()
            raise
        if metrics:
            self.metrics_port = int(re.search(r"metrics port (\d+)", self.log()).group(1))

    def _ready(self):
        if self.process.poll() is not None:
            raise AssertionError(f"the server did not start:\n{self.log()}")
        try:
            reply = self.client.health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        except grpc.RpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self):
        return self.process.wait(timeout=PATIENCE_S)

    def stop(self):
        if hasattr(self, "client"):
            self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()

    def metrics(self):
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
            return Metrics(reply.read().decode())


class Metrics:
    """A scrape in the Prometheus text format; parsing is strict."""

    _SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
    _LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
    _LABELS = re.compile(rf"(?:{_LABEL.pattern}(?:,{_LABEL.pattern})*)?")

    def __init__(self, text):
        self.types = {}
        self.help = {}
        self.samples = {}
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                name, kind = line[7:].split(" ")
                assert name not in self.types, f"two TYPE lines for {name}"
                self.types[name] = kind
            elif line.startswith("# HELP "):
                name, text_of = line[7:].split(" ", 1)
                self.help[name] = text_of
            else:
                match = self._SAMPLE.fullmatch(line)
                assert match, f"not a sample: {line!r}"
                name, labels, value = match.groups()
                labels = labels or ""
                assert self._LABELS.fullmatch(labels), f"not labels: {line!r}"
                pairs = self._LABEL.findall(labels)
                key = (name, frozenset(pairs))
                assert key not in self.samples, f"twice: {line!r}"
                self.samples[key] = float(value)

    def value(self, name, **labels):
        return self.samples[name, frozenset(labels.items())]

    def total(self, name):
        return sum(value for (other, _), value in self.samples.items() if other == name)

    def family(self, sample_name):
        if sample_name in self.types:
            return sample_name
        return re.sub(r"_(bucket|sum|count)$", "", sample_name)


class Client:
    """The stubs of one connection."""

    def __init__(self, address, options=()):
        self.address = address
        self.channel = grpc.insecure_channel(address, options=[
            ("grpc.max_receive_message_length", 64 << 20),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            *options])
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.sessions = sessions_pb2_grpc.SessionsStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.reflection = reflection_pb2_grpc.ServerReflectionStub(self.channel)

    def close(self):
        self.channel.close()

    def model(self):
        return self.inference.GetModel(inference_pb2.GetModelRequest(), timeout=PATIENCE_S)

    def model_later(self):
        """A future of the answer."""
        return self.inference.GetModel.future(inference_pb2.GetModelRequest(), timeout=PATIENCE_S)

    def create(self, **fields):
        return self.sessions.CreateSession(sessions_pb2.CreateSessionRequest(**fields),
                                           timeout=PATIENCE_S).session_id

    def get(self, session):
        return self.sessions.GetSession(sessions_pb2.GetSessionRequest(session_id=session),
                                        timeout=PATIENCE_S)

    def delete(self, session):
        return self.sessions.DeleteSession(sessions_pb2.DeleteSessionRequest(session_id=session),
                                           timeout=PATIENCE_S)

    def fork(self, session, **fields):
        reply = self.sessions.ForkSession(
            sessions_pb2.ForkSessionRequest(session_id=session, **fields), timeout=PATIENCE_S)
        return [copy.session_id for copy in reply.sessions]

    def list(self, **fields):
        return self.sessions.ListSessions(sessions_pb2.ListSessionsRequest(**fields),
                                          timeout=PATIENCE_S)

    def prefill(self, *sequences):
        return self.inference.Prefill(inference_pb2.PrefillRequest(sequences=sequences),
                                      timeout=PATIENCE_S)

    def step(self, *sequences):
        return self.inference.Step(inference_pb2.StepRequest(sequences=sequences),
                                   timeout=PATIENCE_S)

    def generate(self, prompt, timeout=PATIENCE_S, **fields):
        """The call, which is an iterator of messages."""
        return self.inference.Generate(generate_request(prompt, **fields), timeout=timeout)

    def generate_tokens(self, prompt, **fields):
        return collect(self.generate(prompt, **fields))[0]


def tokens_input(ids):
    return types_pb2.Input(token_ids=types_pb2.TokenIds(ids=ids))


def hidden_input(data, shape, element_type=types_pb2.ELEMENT_TYPE_FLOAT32):
    return types_pb2.Input(
        hidden_states=types_pb2.Tensor(element_type=element_type, shape=shape, data=data))


def sequence(session, ids, expected_position=None, **output):
    """A SequenceRequest; `ids` may be bytes, a list of ids, or an Input."""
    return types_pb2.SequenceRequest(
        session_id=session, expected_position=expected_position,
        input=ids if isinstance(ids, types_pb2.Input) else tokens_input(ids),
        output=types_pb2.OutputSelection(**output))


def step_request(*sequences):
    return inference_pb2.StepRequest(sequences=sequences)


def generate_request(prompt, sampling=None, **fields):
    return inference_pb2.GenerateRequest(
        input=prompt if isinstance(prompt, types_pb2.Input) else tokens_input(prompt),
        sampling=types_pb2.Sampling(**(sampling or {})), **fields)


def collect(call):
    """Reads a Generate call to its end: its tokens and its last message."""
    tokens = []
    last = None
    for message in call:
        assert last is None or last.finish_reason == inference_pb2.FINISH_REASON_UNSPECIFIED, \
            "a message after the one with a finish_reason"
        tokens.extend(message.tokens)
        last = message
    assert last.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED, "no finish_reason"
    return tokens, last


def ids_of(tokens):
    return [token.id for token in tokens]


def floats(data):
    return struct.unpack(f"<{len(data) // 4}f", data)


def relative_error(values, expected):
    """Relative L2 distance."""
    assert len(values) == len(expected), (len(values), len(expected))
    distance = sum((a - b) ** 2 for a, b in zip(values, expected)) ** 0.5
    return distance / sum(b * b for b in expected) ** 0.5


def details(error):
    """The decoded grpc-status-details-bin of an RpcError, or None."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    return None


def position_mismatch(error):
    for detail in details(error).details:
        mismatch = types_pb2.PositionMismatch()
        if detail.Unpack(mismatch):
            return mismatch
    raise AssertionError("no PositionMismatch in the details")


def retry_info(error):
    for detail in details(error).details:
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return info
    raise AssertionError("no RetryInfo in the details")


class Golden:
    """Tensors of a safetensors file, as tuples."""

    def __init__(self, path):
        with open(path, "rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            self._header = json.loads(file.read(size))
            self._data = file.read()

    def __call__(self, name):
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        code = {"F32": "f", "I32": "i"}[entry["dtype"]]
        return struct.unpack(f"<{(end - begin) // 4}{code}", self._data[begin:end])


class TestCase(unittest.TestCase):
    """With a server for the class, where FLAGS is set."""

    FLAGS = None
    METRICS = False

    @classmethod
    def setUpClass(cls):
        if cls.FLAGS is not None:
            cls.server = Server(*cls.FLAGS, metrics=cls.METRICS)
            cls.addClassCleanup(cls.server.stop)
            cls.client = cls.server.client

    @property
    def continuation(self):
        """What follows PROMPT. With bfloat16 products a near-tie may fall either way, so there it
        is what the server itself says."""
        if not DEVICE:
            return CONTINUATION
        cls = type(self)
        if not hasattr(cls, "_continuation"):
            cls._continuation = bytes(
                ids_of(self.client.generate_tokens(PROMPT, max_new_tokens=96)))
        return cls._continuation

    def tearDown(self):
        if self.FLAGS is not None:
            self.assertIsNone(self.server.process.poll(), "the server has died")

    @contextlib.contextmanager
    def refused(self, code, *parts):
        """The block must raise an RpcError with this code and a message with all the parts."""
        with self.assertRaises(grpc.RpcError) as caught:
            yield caught
        self.check_refusal(caught.exception, code, *parts)

    def check_refusal(self, error, code, *parts):
        self.assertEqual(error.code(), code, error.details())
        for part in parts:
            self.assertIn(part, error.details())

    def assert_idle(self, session):
        eventually(lambda: not self.client.get(session).in_use, f"{session} is free")
