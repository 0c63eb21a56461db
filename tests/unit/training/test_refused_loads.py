"""What a trainer refuses to load or to train on."""

import dataclasses
import json

import pytest
from safetensors.torch import load
from trained_rollouts import follow, part_named, run_config, trainer

from miles_core.errors import StageError
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_bytes, write_file
from miles_core.weights.packing import to_safetensors
from miles_core.weights.raw import file_metadata

SHARD = "shard-00001-model-00001-of-00001.safetensors"
ADAPTER = "adapter/pytorch_lora_weights.safetensors"


class TestRefusedLoads:
    """A failed load is an error, never a fresh start (pitfalls 14, 44)."""

    @pytest.fixture(scope="class")
    def trained(self, iteration):
        one = trainer(run_config(lr=1e-2), iteration.model)
        one.start()
        try:
            return one.update(iteration.files, iteration.inputs("loads"), "loads/out")
        finally:
            one.stop()

    def test_adapter_without_its_checkpoint(self, iteration, make, trained):
        with pytest.raises(StageError, match="checkpoint is absent"):
            make().load(iteration.files, [part_named(trained.parts, ADAPTER)], trained.policy_digest)

    @pytest.mark.parametrize("name", ["trainer_state.json", "rng.safetensors", SHARD])
    def test_part_of_a_checkpoint(self, iteration, make, trained, name):
        one = make()
        with pytest.raises(StageError, match=f"lacks {name}"):
            one.load(iteration.files, [p for p in trained.parts if not p.path.endswith(name)], trained.policy_digest)
        assert one.policy() == ""

    def test_damaged_file(self, iteration, make, trained, tmp_path):
        files = Files(str(tmp_path))
        parts: list[Part] = []
        for part in trained.parts:
            data = bytearray(read_bytes(iteration.files, part))
            if "shard-" in part.path:
                data[-5] ^= 1
            files.create(part.path, bytes(data))
            parts.append(part)
        with pytest.raises(StageError, match="SHA-256"):
            make().load(files, parts, trained.policy_digest)

    def test_other_rank_and_alpha(self, iteration, make, trained):
        with pytest.raises(StageError, match="rank 4 and alpha 8, this run 4 and 16"):
            make(lora_alpha=16).load(iteration.files, trained.parts, trained.policy_digest)
        with pytest.raises(StageError, match="rank 4 and alpha 8, this run 2 and 8"):
            make(lora_rank=2).load(iteration.files, iteration.policy, iteration.digest)

    def test_other_modules(self, iteration, make, trained):
        with pytest.raises(StageError, match="other tensors"):
            make(lora_target_modules=["attn.to_q"]).load(iteration.files, trained.parts, trained.policy_digest)
        with pytest.raises(StageError, match="other modules"):
            make(lora_target_modules=["attn.to_q"]).load(iteration.files, iteration.policy, iteration.digest)

    def test_failed_load_leaves_nothing_to_go_on_with(self, iteration, make, trained):
        """Not the initial weights with the progress of the checkpoint (pitfall 44)."""
        one = make(lr=1e-2)
        lacking = dataclasses.replace(
            follow(iteration, trained, "loads/lacking", 1),
            policy_parts=[p for p in trained.parts if not p.path.endswith("rng.safetensors")],
        )
        for out in ("loads/first", "loads/second"):
            with pytest.raises(StageError, match="lacks rng.safetensors"):
                one.update(iteration.files, lacking, out)
            assert one.policy() == "" and iteration.files.list(out) == []
        with pytest.raises(StageError, match="has not trained yet"):
            one.init_policy(iteration.files, "loads/init")
        result = one.update(iteration.files, follow(iteration, trained, "loads/whole", 1), "loads/whole/out")
        assert result.metrics[0]["global_step"] == 1

    def test_random_states_with_a_gap(self, iteration, make, trained):
        """pitfall 13"""
        saved = load(read_bytes(iteration.files, part_named(trained.parts, "rng.safetensors")))
        gap = to_safetensors({"rank1.cpu": saved["rank0.cpu"]})
        part = write_file(iteration.files, "loads/gap/checkpoint/rng.safetensors", gap)
        parts = [part if p.path.endswith("rng.safetensors") else p for p in trained.parts]
        with pytest.raises(StageError, match="lacks the random state of rank 0"):
            make().load(iteration.files, parts, trained.policy_digest)

    @pytest.mark.parametrize("kept", [slice(2, 4), slice(0, 2)])
    def test_tensor_that_is_there_in_part(self, iteration, make, trained, kept):
        """The reader of the distributed checkpoint would leave the gap as it was (pitfalls 12, 45)."""
        data = read_bytes(iteration.files, part_named(trained.parts, SHARD))
        name = "exp_avg.transformer_blocks.0.attn.to_q.lora_A.weight"
        tensors, offsets = load(data), json.loads(file_metadata(data)["DCP_SHARDING_INFO"])
        assert tensors[name].shape[0] == 4 and tensors[name][:2].any() and tensors[name][2:].any()
        tensors[name] = tensors[name][kept].clone()
        offsets[name]["saved_offsets"] = [kept.start, 0]
        metadata = {**file_metadata(data), "DCP_SHARDING_INFO": json.dumps(offsets)}
        place = f"loads/gap-{kept.start}/checkpoint/{SHARD}"
        part = write_file(iteration.files, place, to_safetensors(tensors, metadata))
        parts = [part if p.path.endswith(SHARD) else p for p in trained.parts]
        half = tensors[name].numel()
        with pytest.raises(StageError, match=f"holds {half} of the {2 * half} elements of {name}"):
            make().load(iteration.files, parts, trained.policy_digest)

    def test_other_digest(self, iteration, make, trained):
        with pytest.raises(StageError, match="was asked for"):
            make().load(iteration.files, trained.parts, iteration.digest)

    def test_other_iteration(self, iteration, make, trained):
        inputs = follow(iteration, trained, "loads/next", 3)
        with pytest.raises(StageError, match="belongs to another iteration"):
            make().update(iteration.files, inputs, "loads/next/out")

    def test_rollout_of_another_policy(self, iteration, make, trained):
        inputs = dataclasses.replace(
            iteration.inputs("loads/off"),
            policy_parts=trained.parts,
            policy_digest=trained.policy_digest,
            first_global_step=1,
        )
        with pytest.raises(StageError, match="was generated by policy"):
            make().update(iteration.files, inputs, "loads/off/out")

    def test_too_few_samples(self, iteration, make):
        inputs = iteration.inputs("few", advantages=(1.0, -1.0))
        with pytest.raises(StageError, match="trains on 4 samples"):
            make().update(iteration.files, inputs, "few/out")
