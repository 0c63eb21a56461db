"""The command line of a sglang server: ours, the user's, and switches of both kinds."""

import pytest

from miles_core.rollout.sglang.server import command


def flags(**options: str) -> dict[str, list[str]]:
    """The flags and the words behind each."""
    found: dict[str, list[str]] = {}
    words = command("/models/a b", "sd3", "bf16", (4000, 4001, 4002), "nonce", options)
    for word in words[words.index("serve") + 1 :]:
        if word.startswith("--"):
            name = found.setdefault(word, [])
        else:
            name.append(word)
    return found


def test_what_it_must_be_told() -> None:
    told = flags()
    assert told["--model-path"] == ["/models/a b"]
    assert told["--backend"] == ["sglang"] and told["--model-id"] == ["stable-diffusion-3.5-medium"]
    assert told["--port"] == ["4000"] and told["--scheduler-port"] == ["4001"] and told["--master-port"] == ["4002"]
    assert told["--served-model-name"] == ["nonce"]
    assert told["--dit-precision"] == ["bf16"] and told["--text-encoder-precisions"] == ["bf16"] * 3
    assert told["--sleep-on-idle"] == [] and told["--strict-ports"] == []
    assert told["--dit-cpu-offload"] == ["false"] and told["--text-encoder-cpu-offload"] == ["false"]


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({"attention_backend": "torch_sdpa"}, "--attention-backend", ["torch_sdpa"]),
        ({"enable_torch_compile": "true"}, "--enable-torch-compile", []),
        ({"vae_cpu_offload": "false"}, "--vae-cpu-offload", ["false"]),
        ({"dit_cpu_offload": "true"}, "--dit-cpu-offload", []),
        ({"sleep_on_idle": "false"}, "--sleep-on-idle", None),
        ({"text_encoder_precisions": "fp32 fp32 bf16"}, "--text-encoder-precisions", ["fp32", "fp32", "bf16"]),
    ],
)
def test_the_users_options_come_before_ours(options: dict[str, str], name: str, words: list[str] | None) -> None:
    assert flags(**options).get(name) == words
