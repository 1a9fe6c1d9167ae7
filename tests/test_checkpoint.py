"""Checkpoint folders become extents with the reference loaders' bytes; damage is named."""

import json
import os
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from offload.checkpoint import extent, open_checkpoint
from offload.errors import CheckpointError, UnsupportedError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def random_tensor(shape, dtype, seed=0):
    """Any bit pattern for any dtype, except bool, which knows two."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def raw(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_same(checkpoint, reference):
    assert set(checkpoint.tensors) == set(reference)
    for name, wanted in reference.items():
        got = checkpoint.tensors[name].read()
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(raw(got), raw(wanted)), name
        assert got.is_contiguous()


def write_shards(folder, shards, suffix="safetensors", metadata=None):
    """`shards`: a list of state dicts, written with an index as transformers does."""
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05}-of-{len(shards):05}.{suffix}"
        weight_map.update(dict.fromkeys(shard, name))
        if suffix == "safetensors":
            save_file(shard, folder / name)
        else:  # one shard in each of the two formats of torch.save
            torch.save(shard, folder / name, _use_new_zipfile_serialization=number % 2 == 1)
    index = {"metadata": metadata or {}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return sorted(set(weight_map.values()))


def write_by_hand(file, header, data):
    raw_header = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw_header)) + raw_header + data)


SMALL = {"a.weight": torch.randn(3, 5), "b.bias": torch.arange(7).to(torch.bfloat16)}


# ---- what is right is read ----------------------------------------------------------------------

tensors = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=6,
)


@quick
@given(tensors, st.integers(0, 1000))
def test_safetensors_equal_the_reference(spec, seed):
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "model.safetensors"
        save_file(
            {key: random_tensor(shape, dtype, seed) for key, (shape, dtype) in spec.items()}, file
        )
        assert_same(open_checkpoint(name), load_file(file))


def test_every_dtype_in_one_file(tmp_path):
    state = {str(dtype): random_tensor((3, 2), dtype) for dtype in DTYPES}
    state |= {f"0-d {dtype}": random_tensor((), dtype) for dtype in DTYPES}
    state |= {f"empty {dtype}": random_tensor((2, 0), dtype) for dtype in DTYPES}
    save_file(state, tmp_path / "model.safetensors")
    assert_same(open_checkpoint(tmp_path), state)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(tmp_path, suffix):
    shards = [SMALL, {"c": torch.randn(4), "d": torch.randn(2, 2).half()}]
    write_shards(tmp_path, shards, suffix, metadata={"total_size": 1})
    checkpoint = open_checkpoint(tmp_path)
    assert_same(checkpoint, shards[0] | shards[1])
    assert checkpoint.format == suffix
    assert len(checkpoint.files) == 2
    assert checkpoint.metadata["total_size"] == 1
    assert checkpoint.total_bytes == 3 * 5 * 4 + 7 * 2 + 4 * 4 + 4 * 2


def test_a_saved_model_in_many_shards(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) > 5
    assert_same(checkpoint, model.state_dict())


def test_which_layout_wins_is_as_in_transformers(tmp_path):
    torch.save({"from": torch.tensor(1)}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).format == "bin"
    write_shards(tmp_path, [{"from": torch.tensor(2)}])
    assert open_checkpoint(tmp_path).tensors["from"].read() == 2
    save_file({"from": torch.tensor(3)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).tensors["from"].read() == 3
    save_file({"from": torch.tensor(4)}, tmp_path / "other.safetensors")
    (tmp_path / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    assert open_checkpoint(tmp_path).tensors["from"].read() == 4


def test_a_single_file_of_another_name(tmp_path):
    save_file(SMALL, tmp_path / "llama-ß-模型.safetensors")
    assert_same(open_checkpoint(tmp_path), SMALL)
    save_file(SMALL, tmp_path / "second.safetensors")
    with pytest.raises(CheckpointError, match=r"several weight files.*index\.json"):
        open_checkpoint(tmp_path)


def test_unpadded_header_and_odd_first_tensor(tmp_path):
    odd, words = torch.tensor([1, 2, 3], dtype=torch.uint8), torch.randn(4)
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "words": {"dtype": "F32", "shape": [4], "data_offsets": [3, 19]},
    }
    text = json.dumps(header).encode()
    text += b" " * (3 - len(text) % 4)  # an odd length
    file = tmp_path / "model.safetensors"
    write_by_hand(file, text, bytes(odd.tolist()) + words.numpy().tobytes())
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["words"].offset % 4 == 2
    assert_same(checkpoint, {"odd": odd, "words": words})
    assert_same(checkpoint, load_file(file))


def test_a_tensor_name_of_many_letters(tmp_path):
    state = {"layer." * 1000 + "weight": torch.randn(2), "gewicht.ß.重み": torch.randn(3)}
    write_shards(tmp_path, [{name: value} for name, value in state.items()])
    assert_same(open_checkpoint(tmp_path), state)


def test_links_of_a_hub_snapshot(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    shards = write_shards(blobs, [SMALL, {"c": torch.randn(4)}])
    for name in [*shards, "model.safetensors.index.json"]:
        (blobs / name).rename(blobs / f"digest-{name}")
        (snapshot / name).symlink_to(f"../../blobs/digest-{name}")
    checkpoint = open_checkpoint(snapshot)
    assert torch.equal(checkpoint.tensors["a.weight"].read(), SMALL["a.weight"])
    assert (
        checkpoint.files[0][1]
        == (blobs / f"digest-{Path(checkpoint.files[0][0]).name}").stat().st_size
    )
    (blobs / "digest-model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors \(a link to nothing\)"):
        open_checkpoint(snapshot)


def test_paths_are_absolute_wherever_the_process_goes(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    save_file(SMALL, tmp_path / "m" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("m")
    monkeypatch.chdir("/")
    assert_same(checkpoint, SMALL)


def test_no_weight_is_read_at_open(tmp_path):
    """A sparse file of 1 TB opens at once, and its headers alone cost its opening."""
    count = 1 << 40
    header = {"big": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}
    file = tmp_path / "model.safetensors"
    write_by_hand(file, header, b"")
    try:
        os.truncate(file, file.stat().st_size + count)
    except OSError as error:
        pytest.skip(f"no sparse files of 1 TB here: {error}")
    assert open_checkpoint(tmp_path).total_bytes == count


def test_a_tensor_that_takes_many_reads(tmp_path, monkeypatch):
    """One system call moves less than 2 GiB; the loop around it is tried with a smaller step."""
    save_file(SMALL, tmp_path / "model.safetensors")
    monkeypatch.setattr(extent, "_MAX_READ", 7)
    assert_same(open_checkpoint(tmp_path), SMALL)


def test_a_file_that_shrinks_after_open(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(SMALL, file)
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends at byte \d+"):
        [place.read() for place in checkpoint.tensors.values()]


def test_reads_leave_no_open_file(tmp_path):
    save_file(SMALL, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        checkpoint.tensors["a.weight"].read()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- the fingerprint ----------------------------------------------------------------------------


def test_the_fingerprint_changes_with_everything_that_counts(tmp_path):
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    save_file(SMALL, file)
    config.write_text("{}")
    os.utime(file, ns=(10**18, 10**18))
    seen = [open_checkpoint(tmp_path).fingerprint(dtype="bf16")]
    assert open_checkpoint(tmp_path).fingerprint(dtype="bf16") == seen[0]
    assert all(letter in "0123456789abcdef" for letter in seen[0])
    seen.append(open_checkpoint(tmp_path).fingerprint(dtype="fp16"))
    seen.append(open_checkpoint(tmp_path).fingerprint(dtype="bf16", version=2))
    config.write_text('{"tie_word_embeddings": true}')
    seen.append(open_checkpoint(tmp_path).fingerprint(dtype="bf16"))
    os.utime(file, ns=(10**18, 10**18 + 1))
    seen.append(open_checkpoint(tmp_path).fingerprint(dtype="bf16"))
    content = file.read_bytes().replace(b"b.bias", b"b.biaz")
    file.write_bytes(content)
    os.utime(file, ns=(10**18, 10**18 + 1))
    seen.append(open_checkpoint(tmp_path).fingerprint(dtype="bf16"))
    assert len(set(seen)) == len(seen)


def test_the_fingerprint_does_not_depend_on_the_place(tmp_path):
    one = tmp_path / "one"
    one.mkdir()
    save_file(SMALL, one / "model.safetensors")
    before = open_checkpoint(one).fingerprint()
    shutil.copytree(one, tmp_path / "two")  # keeps the times
    assert open_checkpoint(tmp_path / "two").fingerprint() == before


# ---- what is wrong is named ---------------------------------------------------------------------


def test_truncated_file(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(SMALL, file)
    size = file.stat().st_size
    os.truncate(file, size - 10)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    message = str(caught.value)
    assert str(file) in message and "download it again" in message
    assert f"should have {size} bytes" in message and f"it has {size - 10};" in message


@pytest.mark.parametrize("keep", range(40))
def test_a_file_cut_anywhere_in_its_header(tmp_path, keep):
    file = tmp_path / "model.safetensors"
    save_file(SMALL, file)
    os.truncate(file, keep)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*download it again"):
        open_checkpoint(tmp_path)


def test_one_byte_too_many(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(SMALL, file)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="should have"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_lfs_pointer(tmp_path, name):
    (tmp_path / name).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4265\n"
    )
    with pytest.raises(CheckpointError, match=rf"{name} is a git-LFS pointer.*git lfs pull"):
        open_checkpoint(tmp_path)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        (b"[]", 0, "does not begin with"),
        (b"{", 0, "not valid JSON"),
        (b"{\xff}", 0, "not valid JSON"),
        (b'{"a":' + b"[" * 100_000, 0, "not valid JSON"),
        (b'{"a":' + b"9" * 100_000 + b"}", 0, "not valid JSON"),
        ({"a": 3}, 0, "not an object"),
        ({"a": {"dtype": "F32"}}, 0, "shape is None"),
        ({"a": entry(shape=(-2,))}, 8, "negative"),
        ({"a": entry(shape=(2.0,))}, 8, "not a list of sizes"),
        ({"a": entry(shape=(True, 2))}, 8, "not a list of sizes"),
        ({"a": entry(shape=(0, 1 << 62, 1 << 62), offsets=(8, 8))}, 8, "is beyond any memory"),
        ({"a": entry(offsets=(0, 8, 9))}, 8, "not two byte positions"),
        ({"a": entry(offsets=(8, 0))}, 8, "hold -8 bytes"),
        ({"a": entry(offsets=(0, 7))}, 7, "hold 7 bytes.*needs 8"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "'b' at byte .* overlaps tensor 'a'"),
        ({"a": entry(), "b": entry(offsets=(9, 17))}, 17, "'b' .* leaves a hole after tensor 'a'"),
        ({"a": entry(offsets=(4, 12))}, 12, "'a' .* leaves a hole after the header"),
        ({"a": entry(), "__metadata__": {"x": 1}}, 8, "__metadata__"),
        ({"a": entry(shape=(1 << 40, 1 << 40), offsets=(0, 1 << 62))}, 8, "hold"),
    ],
)  # fmt: skip
def test_contradicting_headers(tmp_path, header, size, message):
    file = tmp_path / "model.safetensors"
    write_by_hand(file, header, bytes(size))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 1000
    with pytest.raises(safetensors.SafetensorError):
        load_file(file)


def test_a_name_that_stands_twice(tmp_path):
    one = json.dumps(entry()).encode()
    write_by_hand(tmp_path / "model.safetensors", b'{"a":%s,"a":%s}' % (one, one), bytes(8))
    with pytest.raises(CheckpointError, match="'a' stands there twice"):
        open_checkpoint(tmp_path)


def test_absurd_header_length(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 60) + b"{}" * 50)
    with pytest.raises(CheckpointError, match=rf"header of {1 << 60} bytes"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F4", "Q5"])
def test_unknown_dtype(tmp_path, dtype):
    write_by_hand(tmp_path / "model.safetensors", {"w.x": entry(dtype)}, bytes(8))
    with pytest.raises(UnsupportedError, match=rf"model\.safetensors.*'w\.x'.*{dtype}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_all_missing_shards_are_listed(tmp_path, suffix):
    names = write_shards(tmp_path, [{f"t{i}": torch.randn(2)} for i in range(5)], suffix)
    (tmp_path / names[1]).unlink()
    (tmp_path / names[3]).unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    message = str(caught.value)
    assert names[1] in message and names[3] in message and names[0] not in message
    assert "2 of the 5" in message and "incomplete download" in message


def test_a_tensor_in_two_shards(tmp_path):
    names = write_shards(tmp_path, [{"a": torch.randn(2)}, {"b": torch.randn(2)}])
    save_file({"b": torch.randn(2), "a": torch.randn(2)}, tmp_path / names[1])
    with pytest.raises(CheckpointError, match=rf"'a' is in two files.*{names[0]}.*{names[1]}"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_what_its_shard_lacks(tmp_path):
    names = write_shards(tmp_path, [{"a": torch.randn(2)}, {"b": torch.randn(2)}])
    save_file({"c": torch.randn(2)}, tmp_path / names[1])
    with pytest.raises(CheckpointError, match=rf"'b' in {names[1]}, but that file does not hold"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not the name of a file"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not the name of a file"),
        ('{"weight_map": {"a": "x\\u0000y"}}', "not the name of a file"),
        ('{"weight_map": {"a": 7}}', "not the name of a file"),
        ('{"weight_map": {"a": "%s"}}' % ("x" * 5000), "missing"),
    ],
)
def test_bad_indexes(tmp_path, index, message):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "model.safetensors.index.json" in str(caught.value)


def test_folders_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no weights: none of model\.safetensors"):
        open_checkpoint(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor"):
        open_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_config_that_is_no_json(tmp_path):
    save_file(SMALL, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq", "mxfp4", "bitsandbytes"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantised_is_refused_before_a_weight_file_is_touched(tmp_path, method, nested):
    (tmp_path / "model.safetensors").mkdir()  # touching it would be another error
    config = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
    with pytest.raises(UnsupportedError, match=method) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_an_empty_quantization_config_is_none(tmp_path):
    save_file(SMALL, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    assert_same(open_checkpoint(tmp_path), SMALL)


# ---- mutated headers ----------------------------------------------------------------------------

MUTANT = {
    "a.weight": torch.randn(3, 2),
    "b": torch.arange(3, dtype=torch.uint8),
    "c": torch.tensor(1.5).half(),
    "e": torch.empty(0, 10, dtype=torch.int16),
}


@settings(quick, max_examples=400)
@given(data=st.data())
def test_a_mutated_header_loads_the_same_or_is_refused(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutant")
    file = folder / "model.safetensors"
    save_file(MUTANT, file, metadata={"format": "pt"})
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    place = data.draw(st.integers(0, header - 1))
    kind = data.draw(st.sampled_from(["replace", "insert", "delete"]))
    byte = data.draw(st.one_of(st.sampled_from(list(b'0123456789-+.eE"{}[],: \\FBUI_')),
                               st.integers(0, 255)))  # fmt: skip
    if kind == "replace":
        content[place] = byte
    elif kind == "insert":
        content.insert(place, byte)
    else:
        del content[place]
    if kind != "replace" and place >= 8 and data.draw(st.booleans()):  # a consistent length
        content[:8] = struct.pack("<Q", header - 8 + (1 if kind == "insert" else -1))
    file.write_bytes(content)
    try:
        checkpoint = open_checkpoint(folder)
        got = {name: place.read() for name, place in checkpoint.tensors.items()}
    except (CheckpointError, UnsupportedError) as error:
        assert str(file) in str(error)
        return
    reference = load_file(file)  # what we accept, the reference accepts, with the same bytes
    assert set(got) == set(reference)
    for name, tensor in reference.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(raw(got[name]), raw(tensor))
