"""An engine never generates under another policy than the one that the rows will name."""

import pytest

from deployments.recipes import recipe
from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.rollout.protocol import GenerateRequest
from miles_core.runtime.actors import EngineActor, WrongPolicy
from miles_core.runtime.fenced import Terms


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineActor:
    model = make_tiny_sd3(tmp_path_factory.mktemp("model") / "tiny-stable-diffusion-3.5-medium")
    return EngineActor(Terms("engine-0", 1, "", 0.0, {}), recipe("tiny"), str(model), "sd3", "cpu")


def request() -> GenerateRequest:
    return GenerateRequest(
        prompt="a",
        negative_prompt=None,
        seed=1,
        num_outputs=1,
        height=64,
        width=64,
        num_inference_steps=2,
        guidance_scale=1.0,
        noise_level=0.7,
        sde_type="sde",
        sde_step_indices=(0,),
        log_prob_no_const=False,
        generator_device="cpu",
    )


def test_an_engine_that_was_just_started_refuses_to_generate_for_a_policy_it_was_not_given(engine: EngineActor) -> None:
    with pytest.raises(WrongPolicy, match="engine-0 holds policy none, not 0123456789ab"):
        engine.work(1, "generate", request(), "0123456789abcdef")
    result, receipt = engine.work(1, "generate", request(), "")
    assert receipt.engine == result.engine == "engine-0"


def test_a_refusal_leaves_the_engine_clean_and_a_failed_push_leaves_it_dirty(engine: EngineActor) -> None:
    assert not engine.status(1).dirty
    with pytest.raises(AttributeError):
        engine.work(1, "load_policy", None, None)
    assert engine.status(1).dirty
    assert engine.status(1).busy == ""
