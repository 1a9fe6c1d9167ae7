"""A model's name becomes its folder: an own one, a hub cache, or a download from localhost."""

import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session, constants
from safetensors.torch import save

from offload.checkpoint import open_checkpoint, resolve_model
from offload.errors import ModelNotFoundError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = save({"a": torch.arange(4.0)})
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(cache, repo_id, files, commit=COMMIT, ref="main"):
    """A repository in a hub cache, as the hub's client lays it out: blobs, and links to them."""
    repo = cache / ("models--" + repo_id.replace("/", "--"))
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir(exist_ok=True)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / ref).write_text(commit)
    for name, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        (repo / "blobs" / digest).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    return snapshot


# ---- folders ------------------------------------------------------------------------------------


def test_a_folder_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model("gpt2") == Path("gpt2")  # a folder wins over a hub id
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/gpt2") == tmp_path / "gpt2"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_points_to_its_folder(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    with pytest.raises(NotADirectoryError, match=f"{name} is a file") as caught:
        resolve_model(tmp_path / name)
    assert str(caught.value).endswith(f"instead: {tmp_path}")


@pytest.mark.parametrize("name", ["", "./models/llama", "a/b/c", "/no/such/folder", "~nobody!/x",
                                  "what is this?", "x\0y"])  # fmt: skip
def test_what_can_be_neither(cache, name):
    with pytest.raises(FileNotFoundError, match="cannot be a hub id") as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value)


# ---- the cache ----------------------------------------------------------------------------------


def test_a_cached_model(cache):
    snapshot = put(cache, "owner/tiny", FILES)
    assert resolve_model("owner/tiny") == snapshot
    checkpoint = open_checkpoint(resolve_model("owner/tiny"))
    assert torch.equal(checkpoint.tensors["a"].read(), torch.arange(4.0))


def test_revisions(cache):
    main = put(cache, "tiny", FILES)
    other = put(cache, "tiny", FILES, commit=COMMIT[::-1], ref="v2")
    assert resolve_model("tiny") == main
    assert resolve_model("tiny", revision="v2") == other
    assert resolve_model("tiny", revision=COMMIT[::-1]) == other
    with pytest.raises(ModelNotFoundError, match=r"'v3'.*hf download tiny --revision v3"):
        resolve_model("tiny", revision="v3")


def test_not_in_the_cache(cache):
    with pytest.raises(FileNotFoundError) as caught:
        resolve_model("owner/tiny")
    assert isinstance(caught.value, ModelNotFoundError)
    message = str(caught.value)
    for part in ["'owner/tiny'", "neither a folder nor a hub id", str(cache), "HF_HUB_OFFLINE=1",
                 "`hf download owner/tiny`"]:  # fmt: skip
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_part_in_the_cache(cache, missing):
    put(cache, "owner/tiny", {name: data for name, data in FILES.items() if name != missing})
    with pytest.raises(ModelNotFoundError, match=r"hf download owner/tiny"):
        resolve_model("owner/tiny")


def test_a_part_says_that_it_is_a_part(cache):
    snapshot = put(cache, "owner/tiny", {"config.json": b"{}", "tokenizer.json": b"{}"})
    with pytest.raises(ModelNotFoundError, match="holds only a part of it") as caught:
        resolve_model("owner/tiny")
    assert str(snapshot) in str(caught.value)


def test_a_model_without_tokenizer_is_enough_where_there_is_no_more(cache):
    files = {name: data for name, data in FILES.items() if "tokenizer" not in name}
    assert (
        resolve_model("owner/tiny") == snapshot
        if (snapshot := put(cache, "owner/tiny", files))
        else None
    )


# ---- a hub on localhost -------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """The few answers of the hub that a download needs, for one repository."""

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.served = []
        self.requests = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        self.server.requests += 1
        path = self.path.partition("?")[0]
        files = self.server.files
        if path in ("/api/models/owner/tiny", "/api/models/owner/tiny/revision/main"):
            siblings = [{"rfilename": name} for name in files]
            self.send_json({"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}, body)
        elif path.startswith("/api/models/owner/tiny/tree/"):
            self.send_json(
                [{"type": "file", "path": name, "size": len(data),
                  "oid": hashlib.sha1(data).hexdigest()} for name, data in files.items()],
                body,
            )  # fmt: skip
        elif path.startswith("/owner/tiny/resolve/") and path.split("/", 5)[5] in files:
            name = path.split("/", 5)[5]
            if body:
                self.server.served.append(name)
            self.send_bytes(files[name], body, ETag=f'"{hashlib.sha1(files[name]).hexdigest()}"',
                            **{"X-Repo-Commit": COMMIT})  # fmt: skip
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send_json(self, value, body):
        self.send_bytes(json.dumps(value).encode(), body, **{"Content-Type": "application/json"})

    def send_bytes(self, data, body, **headers):
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def serve():
    hubs = []

    def start(files):
        hubs.append(Hub(files))
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.shutdown()
        hub.server_close()


@pytest.fixture
def online(cache, monkeypatch):
    """`online(address)`: the hub is there."""

    def connect(address):
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    close_session()
    yield connect
    close_session()


EXTRA = {
    "pytorch_model.bin": b"not wanted beside safetensors",
    "onnx/model.onnx": b"not wanted",
    "original/params.json": b"{}",
    "modeling_tiny.py": b"print('code')",
    "README.md": b"not wanted",
}


def test_a_download_takes_what_a_run_needs_and_only_once(serve, online):
    hub = serve(FILES | EXTRA)
    online(hub.address)
    folder = resolve_model("owner/tiny")
    assert sorted(hub.served) == sorted(FILES)
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)
    assert torch.equal(open_checkpoint(folder).tensors["a"].read(), torch.arange(4.0))
    requests = hub.requests
    assert resolve_model("owner/tiny") == folder
    assert hub.requests == requests  # the second time asks nobody


def test_a_download_with_code_and_without_safetensors(serve, online):
    hub = serve({name: data for name, data in (FILES | EXTRA).items() if "safe" not in name})
    online(hub.address)
    resolve_model("owner/tiny", trust_remote_code=True)
    assert sorted(hub.served) == [
        "config.json", "modeling_tiny.py", "pytorch_model.bin", "tokenizer.json",
    ]  # fmt: skip


def test_what_the_cache_lacks_is_fetched(serve, online, cache):
    snapshot = put(cache, "owner/tiny", {"config.json": FILES["config.json"]})
    hub = serve(FILES)
    online(hub.address)
    assert resolve_model("owner/tiny") == snapshot
    assert sorted(hub.served) == ["model.safetensors", "tokenizer.json"]


def test_a_model_that_the_hub_does_not_know(serve, online):
    online(serve(FILES).address)
    with pytest.raises(ModelNotFoundError, match="fetching it from the hub failed") as caught:
        resolve_model("owner/other")
    message = str(caught.value)
    assert "'owner/other'" in message and "`hf download owner/other`" in message
    assert "\n" not in message


def test_no_network(online, cache):
    online("http://127.0.0.1:9")
    with pytest.raises(ModelNotFoundError, match="check the name and the network") as caught:
        resolve_model("owner/tiny")
    assert "\n" not in str(caught.value)
    files = {name: data for name, data in FILES.items() if "tokenizer" not in name}
    snapshot = put(cache, "owner/bare", files)
    assert resolve_model("owner/bare") == snapshot  # its weights are there, the rest cannot be had


def test_what_is_no_name_of_a_model_is_told() -> None:
    with pytest.raises(TypeError, match="a PreTrainedModel, got None"):
        resolve_model(None)  # type: ignore[arg-type]
