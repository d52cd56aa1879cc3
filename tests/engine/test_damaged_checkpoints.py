"""Damaged checkpoints: one clear error for each, that names what is wrong and where."""

from __future__ import annotations

import errno
import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from saggar.engine import EngineConfig, LoadError, open_family
from saggar.engine.models import inspection, registry
from saggar.engine.models.inspection import inspect_model
from saggar.engine.models.source import loading
from saggar.engine.models.source.weights import read_header, read_weights
from saggar.engine.worker.loader import load

from tests.engine.damage import (
    a_class_of_two_lines,
    a_component_elsewhere,
    a_damaged_header,
    a_damaged_index,
    a_damaged_scheduler,
    a_damaged_tokenizer,
    a_dangling_link,
    a_deep_index,
    a_disguised_pickle,
    a_limit_that_is_none,
    a_missing_shard,
    a_missing_text_weight,
    a_missing_weight,
    a_module_of_its_own,
    a_nan_decoder,
    a_nested_pipeline,
    a_parameter_that_is_none,
    a_part_left_out,
    a_part_that_is_not_named,
    a_pickle,
    a_pointer,
    a_size_that_is_none,
    a_text_encoder_of_another_width,
    a_tokenizer_with_code,
    a_tokenizer_without_vocabulary,
    an_auto_model,
    an_empty_file,
    an_empty_tokenizer,
    an_index_without_metadata,
    damaged_json,
    fewer_text_layers,
    layers_below_none,
    missing_component,
    missing_configuration,
    nan_weights,
    truncated_weights,
    unknown_component_class,
    whole_numbers,
    whole_text_numbers,
    wrong_shapes,
    wrong_text_shapes,
)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (an_auto_model, "component vae: AutoModel is neither a model nor a tokenizer, processor or"),
        (a_nested_pipeline, "component scheduler: DiffusionPipeline is neither a model nor"),
        (a_tokenizer_with_code, "tokenizer: ValueError: .* contains custom code"),
        (a_component_elsewhere, r"model_index\.json: the component '\.\./vae' is not a name"),
        (a_deep_index, r"model_index\.json: maximum recursion depth"),
        (a_class_of_two_lines, r"model_index\.json: _class_name 'A\\nB' is not a name"),
        (a_limit_that_is_none, r"saggar\.json: limits: write an integer from 1 on for each"),
        (a_parameter_that_is_none, r"saggar\.json: params: write an object a parameter"),
        (a_size_that_is_none, "unusable configuration: ValueError"),
        (a_module_of_its_own, "component vae: antigravity has no class AutoencoderKL"),
        (a_part_that_is_not_named, "its parts do not make a StableDiffusion3Pipeline: .*tokenizer"),
        (missing_component, "component text_encoder_2 is missing: copy or fetch it again, or write"),
        (missing_configuration, "component vae is missing or has no configuration"),
        (truncated_weights, r"transformer/\S+: \d+ bytes, and it should have \d+: copy or fetch it again"),
        (an_empty_file, r"transformer/\S+: no safetensors file, or cut off in its header: copy or fetch it"),
        (a_damaged_header, r"transformer/\S+: its header is damaged: copy or fetch it again"),
        (a_missing_shard, r"text_encoder_3: the shard model-00002-of-00002\.safetensors is missing: copy or"),
        (a_damaged_index, r"text_encoder_3/model\.safetensors\.index\.json: not an index of shards"),
        (wrong_shapes, r"transformer: weights do not fit its config\.json: \S+ is 32×64 and should be 32×48"),
        (
            wrong_text_shapes,
            r"text_encoder_3: weights do not fit its config\.json: \S+ is 37×64 and should be",
        ),
        (a_missing_weight, r"transformer: weights do not fit its config\.json: \S+weight is missing"),
        (a_missing_text_weight, r"text_encoder: weights do not fit its config\.json: \S+weight is missing"),
        (
            a_pickle,
            r"vae: there are no weights in safetensors, the only form .*\.bin, a pickle, .* convert it",
        ),
        (a_disguised_pickle, r"vae/\S+: a pickle under another name, which is never loaded: convert it"),
        (a_pointer, r"vae/\S+: a pointer of Git LFS, not the weights: run `git lfs pull`"),
        (a_dangling_link, r"vae: \S+ is a link to nothing: copy or fetch it again"),
        (damaged_json, r"transformer/config\.json: .*"),
        (a_damaged_tokenizer, "tokenizer: .*"),
        (a_damaged_scheduler, r"scheduler_config\.json: Expecting value"),
        (unknown_component_class, "component vae: diffusers has no class AutoencoderXYZ"),
        (
            a_part_left_out,
            r"model_index\.json: component vae is left out, and StableDiffusion3Pipeline cannot",
        ),
        (
            layers_below_none,
            r"transformer: weights do not fit .*transformer_blocks\.0 is one more than the 0",
        ),
        (fewer_text_layers, r"text_encoder: weights do not fit .*layers\.1 is one more than the 1 of its"),
        (whole_numbers, r"transformer: weights do not fit .*weight is I8 and should be floating"),
        (whole_text_numbers, r"text_encoder: weights do not fit .*weight is I32 and should be floating"),
        (nan_weights, "the warm-up failed: RowFailed: the latents are not finite after step 1"),
        (a_nan_decoder, "the warm-up failed: RowFailed: what was decoded is not finite"),
        (
            a_text_encoder_of_another_width,
            "the warm-up failed: RuntimeError: .* its parts are damaged or not of",
        ),
        (an_empty_tokenizer, r"tokenizer: tokenizer_config\.json is missing: copy or fetch it again"),
        (
            a_tokenizer_without_vocabulary,
            r"tokenizer: the tokenizer has no vocabulary, such as tokenizer\.json",
        ),
        (
            an_index_without_metadata,
            r"safetensors\.index\.json: it has no metadata: copy or fetch it again",
        ),
    ],
)
def test_a_bad_checkpoint_is_one_clear_error_at_load(
    sd3: Path, damage: Callable[[Path], None], says: str
) -> None:
    damage(sd3)
    with pytest.raises(LoadError, match=says) as caught:
        load(EngineConfig(model=str(sd3), executor="local", threads=1))
    assert str(sd3) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_default_that_no_size_fits_names_its_model(sd3: Path) -> None:
    config = sd3 / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"patch_size": 0}))
    with pytest.raises(LoadError, match="its default 64 is out of range") as caught:
        open_family(str(sd3))
    assert str(caught.value).startswith(f"{sd3}: parameter height")


def test_what_cannot_be_read_is_named(sd3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, and so may tests: the system's answer is pretended."""

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path / "x" if path.is_dir() else path))

    says = r"/x: Permission denied: let this process read all of the folder, and leave it as it is"
    with monkeypatch.context() as patched:
        patched.setattr(loading, "read_weights", refuse)
        with pytest.raises(LoadError, match=says):
            load(EngineConfig(model=str(sd3), executor="local", threads=1))
    with monkeypatch.context() as patched:
        patched.setattr(inspection, "read_weights", refuse)
        with pytest.raises(LoadError, match=says):
            inspect_model(str(sd3))
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(LoadError, match=r"model_index\.json: Permission denied: let this process read all"):
        open_family(str(sd3))


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "lie",
    [
        "[" * 100_000,
        {"a": ENTRY | {"shape": [1000]}},
        {"a": ENTRY | {"shape": [-1]}},
        {"a": ENTRY | {"shape": [10**300, 10**300]}},
        {"a": ENTRY | {"shape": [float("inf")]}},
        {"a": ENTRY | {"dtype": "\x1b[31mF32"}},
        {"a": ENTRY | {"data_offsets": [0.0, 4.0]}},
        {"a": ENTRY, "b": ENTRY},
        {"a": ENTRY | {"data_offsets": [8, 4]}, "b": ENTRY},
    ],
)
def test_a_header_that_lies_is_damaged(tmp_path: Path, lie: object) -> None:
    text = (lie if isinstance(lie, str) else json.dumps(lie)).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"1234")
    with pytest.raises(LoadError, match="its header is damaged"):
        read_header(path)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"weight_map": {"a": 5, "b": null}}'])
def test_a_damaged_index_of_shards_is_named(sd3: Path, content: str) -> None:
    (sd3 / "vae" / "x.safetensors.index.json").write_text(content)
    with pytest.raises(LoadError, match="not an index of shards"):
        read_weights(sd3 / "vae")


def test_what_the_system_refuses_elsewhere_is_not_the_folders_fault(
    sd3: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    errors = [
        FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / "plug-in.json")),
        PermissionError(errno.EACCES, "Permission denied", str(sd3) + "-beside/x"),
        OSError("libnothing.so.1: cannot open shared object file"),
        OSError(errno.EMFILE, "Too many open files", 3),
    ]
    for error in errors:

        def refuse(path: Path, error: OSError = error) -> bytes:
            raise error

        monkeypatch.setattr(loading, "read_weights", refuse)
        with pytest.raises(OSError) as caught:
            load(EngineConfig(model=str(sd3), executor="local", threads=1))
        assert caught.value is error
    monkeypatch.setattr(registry, "families", (tmp_path / "none").read_bytes)
    with pytest.raises(FileNotFoundError):
        open_family(str(sd3))


@pytest.mark.parametrize(
    ("damage", "traced"),
    [
        (truncated_weights, False),
        (nan_weights, False),
        (a_text_encoder_of_another_width, True),  # a RuntimeError of torch
        (a_tokenizer_with_code, True),  # a ValueError of transformers
    ],
)
def test_what_a_library_raised_is_traced_and_what_we_say_ourselves_is_not(
    sd3: Path, damage: Callable[[Path], None], traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    damage(sd3)
    with pytest.raises(LoadError):
        load(EngineConfig(model=str(sd3), executor="local", threads=1))
    traces = [record for record in caplog.records if record.exc_info and record.levelno == logging.ERROR]
    assert len(traces) == traced


def test_an_error_that_names_its_folder_is_its_own_and_no_others_cause(
    sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(open_family(str(sd3)))

    def fail(text: str) -> Callable[..., None]:
        def init(*_: object) -> None:
            raise LoadError(text)

        return init

    for text, wrapped in ((f"{sd3}/vae: is damaged", False), ("is damaged", True)):
        with monkeypatch.context() as patched:
            patched.setattr(kind, "__init__", fail(text))
            with pytest.raises(LoadError) as caught:
                open_family(str(sd3))
        assert str(caught.value).startswith(f"{sd3}")
        assert (caught.value.__cause__ is not None) == wrapped
        assert caught.value.__cause__ is not caught.value
