import json

import pytest
import safetensors.torch
import torch

from miles_core.errors import StageError
from miles_core.weights.adapter_file import adapter_info, to_diffusers, to_push
from miles_core.weights.digest import policy_digest
from miles_core.weights.packing import to_safetensors
from miles_core.weights.raw import file_metadata

TENSORS = {
    "transformer_blocks.0.attn.to_q.lora_A.weight": torch.arange(6.0).reshape(2, 3),
    "transformer_blocks.0.attn.to_q.lora_B.weight": torch.ones(3, 2),
}


def file(**changes):
    return to_diffusers(
        to_safetensors(TENSORS), **{"rank": 2, "alpha": 5, "target_modules": ["attn.to_q"], "global_step": 3, **changes}
    )


def test_push_and_back_keep_every_tensor():
    found = safetensors.torch.load(to_push(file()))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert to_push(file()) == to_safetensors(TENSORS)


def test_same_tensors_give_same_bytes_in_any_order():
    assert to_safetensors(dict(reversed(TENSORS.items()))) == to_safetensors(TENSORS)
    metadata = {"a": "1", "b": "2", "c": "3"}
    assert to_safetensors(TENSORS, metadata) == to_safetensors(TENSORS, dict(reversed(metadata.items())))
    assert file() == file()


def test_the_safetensors_library_reads_every_dtype_back():
    mixed = {
        "wide": torch.randn(3, 2, dtype=torch.float64),
        "half": torch.randn(5).half(),
        "brain": torch.randn(2, 2).bfloat16(),
        "count": torch.tensor([1, 2], dtype=torch.int64),
        "state": torch.arange(7, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "strided": torch.arange(6.0).reshape(2, 3).T,
    }
    found = safetensors.torch.load(to_safetensors(mixed, {"format": "pt"}))
    assert found.keys() == mixed.keys()
    assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in mixed.items())


def test_digest_is_over_tensors_and_not_over_metadata():
    assert policy_digest(to_push(file(alpha=5))) == policy_digest(to_push(file(alpha=6)))
    changed = {**TENSORS, "transformer_blocks.0.attn.to_q.lora_B.weight": torch.zeros(3, 2)}
    assert policy_digest(to_safetensors(changed)) != policy_digest(to_push(file()))


def test_info_comes_back():
    info = adapter_info(file())
    assert (info.rank, info.alpha, info.target_modules, info.global_step) == (2, 5, ("attn.to_q",), 3)
    metadata = json.loads(file_metadata(file())["lora_adapter_metadata"])
    assert metadata["transformer.lora_alpha"] == 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (to_safetensors({"text_encoder.q.lora_A.weight": torch.ones(1)}), "no weight of the transformer"),
        (to_safetensors({}), "no tensor"),
        (b"PK\x03\x04 not safetensors", "no safetensors file"),
    ],
)
def test_what_is_no_adapter_is_refused(data, message):
    with pytest.raises(StageError, match=message):
        to_push(data)


def test_adapter_without_its_rank_is_refused():
    with pytest.raises(StageError, match="rank, alpha"):
        adapter_info(to_safetensors({"transformer.x": torch.ones(1)}))
