"""Names that the reference's pages give, dotted or as a file with a function, lead to ours in a user's module."""

import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.user_code import hook_digest, load_hook

NAMES = """
miles.utils.misc.load_function
miles.utils.types.Sample
miles.rollout.sglang_diffusion_rollout.generate_rollout
miles.rollout.sglang_diffusion_rollout.generate_microgroup
miles.rollout.base_types.call_rollout_fn
miles.rollout.base_types.RolloutFnTrainOutput
miles.rollout.base_types.RolloutFnEvalOutput
miles.rollout.data_source.RolloutDataSourceWithBuffer
miles.rollout.data_source.pop_first
miles.rollout.step_strategy_hub.sde_window
miles.rollout.step_strategy_hub.epoch_global_random_choice
miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
miles.rollout.rm_hub.batched_async_rm
miles.rollout.rm_hub.pickscore._sample_to_rgb_hwc_uint8_frames
miles.ray.data_conversion_hub.flow_grpo.expand_samples_to_train_pairs
miles.backends.fsdp_utils.loss_hub.flow_grpo.prepare_flow_grpo_batch
miles.backends.fsdp_utils.loss_hub.flow_grpo.flow_grpo_loss_formula
""".split()
MODULE = "async def score(args, samples): return []\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_users_module_imports_it(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.rpartition(".")
    own = f"imports_{NAMES.index(name)}"
    (tmp_path / f"{own}.py").write_text(f"from {module} import {attribute}\nimport {module} as whole\n{MODULE}")
    function = load_hook("custom_rm_path", f"{own}.score", str(tmp_path))
    found = function.__globals__[attribute]
    assert callable(found) and found.__module__.startswith("miles_core.")
    assert hook_digest("custom_rm_path", f"{own}.score", str(tmp_path))


def test_nothing_heavy_is_imported_before_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text(f"from miles.utils.types import Sample\n{MODULE}")
    code = (
        "import sys; from miles_core.user_code import load_hook; "
        f"load_hook('custom_rm_path', 'light.score', {str(tmp_path)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_import_error_that_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "wrong_name.py").write_text(f"from miles.utils.types import Sampel\n{MODULE}")
    with pytest.raises(ValueError, match="Sampel"):
        load_hook("custom_rm_path", "wrong_name.score", str(tmp_path))
