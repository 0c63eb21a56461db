"""What is told to a service that is not the run's own holds no credential, and everything else."""

import json

import pytest

from deployments.recipes import recipe
from miles_core.observe.redact import redacted, redacted_text

SECRET = "s3cretT0KEN"


@pytest.mark.parametrize(
    "text",
    [
        f"http://user:{SECRET}@host:8000/score",
        f"https://{SECRET}@host/score",
        f"http://us%40er:{SECRET}@host/a@b",
        f"http://user:p@{SECRET}@host/score",
        f"http://user:pa/{SECRET}@host/score",
        f"redis://:{SECRET}@cache:6379/0",
        f"user:{SECRET}@host:8000/score",
        f"HTTPS://User:{SECRET}@Host",
        f"http://a/x http://user:{SECRET}@b/y",
        f"http://host/score?token={SECRET}",
        f"http://host/score?a=1&api_key={SECRET}&b=2",
        f"http://host/score?key={SECRET}",
        f"http://host/x?X-Amz-Signature={SECRET}&X-Amz-Date=1",
        f"http://host/score#access_token={SECRET}",
        f"http://[::1]:80/?apikey={SECRET}",
        f"Authorization: {SECRET}",
        f"Authorization: Bearer {SECRET}{SECRET}",
        f"--api-key {SECRET} --other 1",
        f"password={SECRET}",
        f"hf_{SECRET}{SECRET}",
        f"a sk-{SECRET}{SECRET} b",
        f"wandb_v1_{SECRET}{SECRET}",
    ],
)
def test_a_credential_in_a_text_is_hidden(text: str) -> None:
    assert SECRET not in redacted_text(text)
    assert "***" in redacted_text(text)
    for nested in (text, [text], (1, text), {"a": {"b": [text]}}):
        assert SECRET not in json.dumps(redacted({"rm_url": nested}))


@pytest.mark.parametrize(
    "name", ["token", "hf_token", "api_key", "wandb_api_key", "aws_secret_access_key", "rm_password", "AUTH", "apikey"]
)
def test_a_value_under_a_secret_name_is_hidden(name: str) -> None:
    assert redacted({"sglang_options": {name: SECRET}, name: SECRET}) == {"sglang_options": {name: "***"}, name: "***"}
    assert redacted({name: None}) == {name: None}


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8000/score",
        "http://host/path@v2",
        "http://host:8000/models/name@main",
        "http://host/score?size=512&keyword=cat",
        "s3://bucket/prefix",
        "my_project.rewards.score",
        "a photo of a key, taken at 10:30 by me@home",
        "/data/tokens/secret-garden/p.jsonl",
        "tiny:sd3",
        "the token of appreciation",
    ],
)
def test_what_is_no_credential_stays(text: str) -> None:
    assert redacted_text(text) == text
    assert redacted({"rm_url": text}) == {"rm_url": text}


def test_the_options_of_a_recipe_stay_as_they_are() -> None:
    """`input_key` and `metadata_key` open nothing."""
    flat = recipe("tiny-ocr").flat()
    assert redacted(flat) == {name: list(v) if isinstance(v, tuple) else v for name, v in flat.items()}


def test_the_given_options_are_not_changed() -> None:
    options = {"rm_url": f"http://u:{SECRET}@h", "sglang_options": {"api_key": SECRET}}
    redacted(options)
    assert options == {"rm_url": f"http://u:{SECRET}@h", "sglang_options": {"api_key": SECRET}}
