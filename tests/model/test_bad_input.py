"""Whatever a file holds, reading it gives a value or one ConfigError line, never another exception."""

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftwood.errors import ConfigError
from draftwood.model.config import K2_6, K2_6_DRAFT, read_drafter_config, read_model_config
from draftwood.model.fields import read_json
from draftwood.model.tensors import SINGLE, Files, read_header

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(config, path=()):
    """Paths of every field in nested objects."""
    for name, value in config.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from places(value, (*path, name))


def one_line_or_value(read, *args):
    try:
        return read(*args)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        return None


@pytest.mark.parametrize(("config", "read"), [(K2_6, read_model_config), (K2_6_DRAFT, read_drafter_config)])
@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_value_in_any_field_reads_or_is_refused(config, read, data):
    changed = copy.deepcopy(config)
    for *parents, last in data.draw(st.lists(st.sampled_from(list(places(config))), min_size=1, max_size=3)):
        place = changed
        for name in parents:
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[last] = data.draw(values)
    one_line_or_value(read, changed)


@given(st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_json_or_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    one_line_or_value(read_json, tmp_path / "config.json")
    one_line_or_value(read_model_config, tmp_path)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": Infinity}', "[" * 100_000])
def test_json_that_means_nothing_certain_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="not JSON"):
        read_json(tmp_path / "x.json")


@given(st.integers(0, 400), st.binary(min_size=1, max_size=12))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_damaged_safetensors_file_reads_or_is_refused(tmp_path, at, damage):
    path = tmp_path / SINGLE
    save_file({"a": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.int32)}, path)
    content = bytearray(path.read_bytes())
    at %= len(content)
    content[at : at + len(damage)] = damage
    path.write_bytes(content)

    def read_all(folder: Path) -> None:
        files = Files(folder)
        for name in files.entries:
            files.read(name)

    one_line_or_value(read_all, tmp_path)


def test_a_header_with_overlapping_tensors_is_refused(tmp_path):
    header = {n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in ("a", "b")}
    text = json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ConfigError, match="header"):
        read_header(tmp_path / SINGLE)


def test_a_folder_without_permission_is_one_line(tmp_path, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", denied)
    monkeypatch.setattr(Path, "exists", denied)
    for read in (read_model_config, read_drafter_config, Files):
        with pytest.raises(ConfigError, match="Permission denied"):
            read(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ConfigError, match="Permission denied"):
        read_json(tmp_path / "config.json")
